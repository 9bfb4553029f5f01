"""Writes the README.md of an ONNX file, and the parts that other pages share."""

import textwrap
from collections.abc import Mapping, Sequence

from vtk.card import Card
from vtk.markdown import span
from vtk.marks import begins
from vtk.packs.prepare_code import prepare_code
from vtk.packs.readme import NO_NAMES, card_sections, classify_code, code_block
from vtk_export.graph.preproc import RAW_TYPES
from vtk_export.graph.sizes import Sizes

README = "README.md"
ONNX, TENSORRT, TASKS = "# An ONNX file of ", "# A TensorRT export of ", "# ONNX files of several tasks"
"""First words of the pages, by which they are recognised."""
IS_OURS = begins(ONNX, TENSORRT, TASKS)

SPACE = "\n\n\n"
"""Separates the definitions of a page's code."""

_BF16 = """
def to_bf16(values):  # NumPy has no bfloat16: ONNX Runtime takes the bits
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(rounded, 16)
"""


def onnx_page(
    card: Card,
    *,
    names: Sequence[str],
    precision: str,
    half_io: bool,
    int8: str = "",
    fp8: bool = False,
    in_graph: bool = False,
    batch: int | None = None,
    sizes: Sizes | None = None,
    verified: bool = True,
    called: Mapping[str, str] = NO_NAMES,
) -> str:
    """Return the page of a folder with one ``model.onnx``.

    Args:
        card: of the model.
        names: outputs, as this toolkit calls them.
        precision: of the weights.
        half_io: inputs and outputs have that type too.
        int8: ``static``, ``dynamic`` or "".
        fp8: the wide products read e4m3.
        in_graph: preprocessing is in the graph.
        batch: fixed batch size, None for any.
        sizes: accepted image sizes, where height and width are open.
        verified: outputs were compared with PyTorch's.
        called: names of inputs and outputs in the file that differ from this toolkit's.
    """
    kind = f"int8 ({int8}), the rest fp32" if int8 else f"fp8 (e4m3), the rest {precision}" if fp8 else precision
    checked = "Its outputs were verified against PyTorch." if verified else "It was not verified."
    half = precision if half_io else ""
    code = onnx_code(card, names=names, half=half, in_graph=in_graph, batch=batch, called=called)
    return (
        f"{ONNX}{span(card.model.name)}\n\n`model.onnx`: weights in {kind}. {checked} "
        f"{input_facts(card, in_graph, half or 'fp32', batch, sizes, alone=int8 == 'dynamic', called=called)}\n\n"
        "With onnxruntime and Pillow installed, run these lines in this folder to load the model; "
        f"{use_of(names[0], called)}:\n\n"
        f"{code}\n"
        f"{card_sections(card, in_graph=in_graph, outputs=tuple(names), called=called)}"
    )


def onnx_code(
    card: Card, *, names: Sequence[str], half: str, in_graph: bool = False, batch: int | None = None,
    called: Mapping[str, str] = NO_NAMES,
) -> str:  # fmt: skip
    """Return the code block that opens ``model.onnx`` and defines ``classify``; arguments are those of `onnx_page`.

    Args:
        half: ``fp16`` or ``bf16`` where inputs and outputs are of that type.
    """
    cuda = '"CUDAExecutionProvider"' if half == "bf16" else '"CPUExecutionProvider"'
    first = (
        "import json\n\nimport onnxruntime\n\n"
        f'session = onnxruntime.InferenceSession("model.onnx", providers=[{cuda}])\n'
        'with open("model.json", encoding="utf-8") as card:\n    classes = json.load(card)["classes"]'
    )
    images = "prepare(path)" if batch is None else f"np.repeat(prepare(path), {batch}, 0)"
    if half == "fp16" and not in_graph:
        images += ".astype(np.float16)"
    if half == "bf16" and not in_graph:
        images = f"to_bf16({images})"
    source = "images" if in_graph else "pixel_values"
    source, ends = called.get(source, source), [called.get(name, name) for name in names]
    outputs = [
        "def run(path):  # the outputs for one image, by name",
        f"    names = {ends}",
        f'    return dict(zip(names, session.run(names, {{"{source}": {images}}})))',
    ]
    if half == "bf16":
        bits = "(value.numpy().astype(np.uint32) << 16).view(np.float32)"
        outputs[2:] = [
            f'    values = session.run_with_ort_values(names, {{"{source}": {images}}})',
            f"    return {{name: {bits} for name, value in zip(names, values)}}",
        ]
    parts = [first, prepare_code(card.input, raw=in_graph)]
    if half == "bf16":
        parts.append(_BF16.strip("\n"))
    parts.append("\n".join(outputs))
    if names[0] != "features":
        parts.append(classify_code(card, f'run(path)["{ends[0]}"][0]', name=names[0]))
    return code_block(*parts)


def use_of(output: str, called: Mapping[str, str] = NO_NAMES) -> str:
    """Return the clause that says what a page's last function returns."""
    if output == "features":
        return f'`run("photo.jpg")["{called.get(output, output)}"]` returns the features of an image'
    return '`classify("photo.jpg")` returns the classes with their probabilities, most likely first'


_ACCEPTED = (
    "ONNX Runtime refuses other types and shapes. Any memory layout is accepted, but not another byte order than the "
    'machine\'s: convert first with `array.astype(array.dtype.newbyteorder("="))`.'
)


def input_facts(
    card: Card,
    in_graph: bool,
    kind: str,
    batch: int | None,
    sizes: Sizes | None,
    *,
    alone: bool = False,
    sides: str = "",
    accepted: str = _ACCEPTED,
    called: Mapping[str, str] = NO_NAMES,
) -> str:
    """Return the sentences that describe the input and what happens to other inputs.

    Args:
        card: of the model.
        in_graph: preprocessing is in the graph.
        kind: type of normalised inputs.
        batch: fixed batch size, None for any.
        sizes: accepted image sizes, where height and width are open.
        alone: an image's outputs depend on the other images of its call.
        sides: replaces the card's height and width.
        accepted: says which types and memory layouts of normalised inputs are accepted.
        called: as of `onnx_page`.
    """
    spec = card.input
    count = "one or more images" if batch is None else f"exactly {batch} image{'s' * (batch > 1)}"
    if in_graph:
        shape = "(batch, height, width, 3), of any size"
        name, kind = "images", RAW_TYPES[spec.value_type].lower()
    else:
        sides = sides or ("height, width" if sizes else f"{spec.height}, {spec.width}")
        name, shape = "pixel_values", f"(batch, {spec.in_chans}, {sides})"
    text = f"Input: `{called.get(name, name)}`, {kind}, {shape}; {count} per call, all of the same size."
    if alone and batch != 1:
        text += " Run one image per call: its outputs depend on the other images of the call."
    if sizes and not sizes.free:
        text += (
            f" The height is a multiple of {sizes.step[0]}, at least {sizes.least[0]}; the width a multiple of "
            f"{sizes.step[1]}, at least {sizes.least[1]}. Other sizes raise an error."
        )
    if not in_graph:
        text += f" {accepted}"
    return text


def preparations(cards: Mapping[str, Card], *, raw: bool = False) -> str:
    """Return code that defines ``prepare``, task name to preprocessing; it follows the definition of ``tasks``."""
    specs = list(dict.fromkeys(card.input for card in cards.values()))
    if len(specs) == 1:
        return f"{prepare_code(specs[0], raw=raw)}\n\n\nprepare = dict.fromkeys(tasks, prepare)"
    definitions = []
    for i, spec in enumerate(specs):
        names = [name for name, card in cards.items() if card.input == spec]
        inside = textwrap.indent(prepare_code(spec, raw=raw), "    ")
        definitions.append(
            f"def preprocessing_{i}():  # of {', '.join(map(repr, names))}\n{inside}\n\n    return prepare"
        )
    table = "".join(f"    {name!r}: preprocessing_{specs.index(card.input)}(),\n" for name, card in cards.items())
    return SPACE.join([*definitions, f"prepare = {{\n{table}}}"])
