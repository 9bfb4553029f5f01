"""Writes the README.md of a folder with an OpenVINO model, and how the files of such a folder are recognised."""

import json
from collections.abc import Sequence

from vtk.card import Card
from vtk.markdown import span
from vtk.marks import begins, beside, tail_says
from vtk.packs.prepare_code import prepare_code
from vtk.packs.readme import card_sections, classify_code, code_block
from vtk.runtime.export_facts import Facts
from vtk_export.graph.sizes import Sizes
from vtk_export.output_folder import CARD, LATENCY
from vtk_export.readme import README, input_facts, use_of

TITLE = "# An OpenVINO model of "

_MODEL = tail_says(b"<card value=", b"&quot;classes&quot;", b"<graph_sha256 value=")

MARKS = {
    "model.xml": _MODEL, "model.bin": beside("model.xml", _MODEL), "model.json": CARD, README: begins(TITLE), **LATENCY,
}  # fmt: skip
"""All files of an export and their recognisers."""

HINTS = {"fp32": "f32", "bf16": "bf16"}
_ACCEPTED = "OpenVINO refuses other shapes; give arrays of that type, in C order."


def page(
    card: Card, facts: Facts, *, names: Sequence[str], precision: str, batch: int | None, sizes: Sizes | None
) -> str:  # fmt: skip
    """Return the page of a folder.

    Args:
        card: of the model.
        facts: of the model.
        names: of the outputs, as this toolkit calls them.
        precision: of products, which the code asks for.
        batch: fixed batch size, None for any.
        sizes: accepted image sizes, where height and width are open.
    """
    kind = "of products int8, the rest fp32" if facts.int8 else f"stored in {facts.stored}" if facts.stored else "fp32"
    verified = "fp32" if precision == "fp32" else f"fp32 and {precision}"
    asked = "what is not int8 in bf16" if facts.int8 else "bf16 products"
    bf16 = (
        f"The code below asks for {asked}, which a processor with AVX512_BF16 or AMX computes; others take fp32. "
        if precision == "bf16"
        else ""
    )
    text = input_facts(
        card, facts.preprocessing, "fp32", batch, sizes, accepted=_ACCEPTED, called=facts.names
    )  # fmt: skip
    return (
        f"{TITLE}{span(card.model.name)}\n\n`model.xml` with `model.bin`: weights {kind}. Its outputs were verified "
        f"against PyTorch in {verified}. {bf16}{text}\n\n"
        f"With openvino and Pillow installed, run these lines in this folder to load the model; "
        f"{use_of(names[0], facts.names)}:\n\n"
        f"{code(card, facts, names=names, precision=precision, batch=batch)}\n"
        f"{card_sections(card, in_graph=facts.preprocessing, outputs=tuple(names), called=facts.names)}\n"
        "## Metadata\n\n"
        'Card and facts are in the model, as JSON: `model.get_rt_info(["vtk", "card"])` after '
        '`openvino.Core().read_model("model.xml")`; labels are in `["model_info", "labels"]`, where OpenVINO\'s own '
        "tools look for them.\n"
    )


def code(card: Card, facts: Facts, *, names: Sequence[str], precision: str, batch: int | None) -> str:
    """Return the code block that compiles the model and defines ``classify``; arguments are those of `page`."""
    # or activations that meet int8 weights alone would be rounded to int8 as they come
    rounds = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0} if facts.int8 else {}
    settings = json.dumps({"INFERENCE_PRECISION_HINT": HINTS[precision], "PERFORMANCE_HINT": "LATENCY", **rounds})
    first = (
        "import json\n\nimport openvino\n\n"
        "core = openvino.Core()\n"
        f"settings = {settings}\n"
        'model = core.compile_model("model.xml", "CPU", settings)\n'
        'with open("model.json", encoding="utf-8") as card:\n    classes = json.load(card)["classes"]'
    )
    images = "prepare(path)" if batch is None else f"np.repeat(prepare(path), {batch}, 0)"
    ends = [facts.name(name) for name in names]
    run = (
        "def run(path):  # the outputs for one image, by name\n"
        f"    outputs = model({images})\n"
        f"    return {{name: outputs[name] for name in {ends}}}"
    )
    parts = [first, prepare_code(card.input, raw=facts.preprocessing), run]
    if names[0] != "features":
        parts.append(classify_code(card, f'run(path)["{ends[0]}"][0]', name=names[0]))
    return code_block(*parts)
