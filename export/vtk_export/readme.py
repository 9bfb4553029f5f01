"""The README.md of exported files: the lines that run them with ONNX Runtime, NumPy and Pillow alone."""

import re
import textwrap
from collections.abc import Mapping, Sequence

from vtk.card import Card
from vtk.markdown import span
from vtk.marks import begins
from vtk.packs.prepare_code import prepare_code
from vtk.packs.readme import card_sections, classify_code, code_block, shares_code
from vtk_export.graph.preproc import RAW_TYPES
from vtk_export.graph.sizes import Sizes

README = "README.md"
ONNX, TENSORRT, TASKS = "# An ONNX file of ", "# A TensorRT export of ", "# ONNX files of several tasks"
"""How the pages begin, and are recognised."""
IS_OURS = begins(ONNX, TENSORRT, TASKS)

SPACE = "\n\n\n"
"""Between the definitions of a page's code."""

_BF16 = """
def to_bf16(values):  # NumPy has no such type: ONNX Runtime takes the bits
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
) -> str:
    """Return the page of a folder with one ``model.onnx``.

    Args:
        card: of the model.
        names: of the outputs.
        precision: of the weights.
        half_io: inputs and outputs are of that type, too.
        int8: static, dynamic, or nothing.
        fp8: the wide products read e4m3.
        in_graph: the graph resizes and normalises.
        batch: fixed number of images, None for any.
        sizes: that it takes, where height and width are open.
        verified: its outputs were compared with torch's.
    """
    kind = f"int8 ({int8}), the rest fp32" if int8 else f"fp8 (e4m3), the rest {precision}" if fp8 else precision
    checked = "Its outputs were compared with torch's before it was kept." if verified else "It was not verified."
    half = precision if half_io else ""
    code = onnx_code(card, names=names, half=half, in_graph=in_graph, batch=batch)
    return (
        f"{ONNX}{span(card.model.name)}\n\n`model.onnx` has its weights in {kind}. {checked} "
        f"{_facts(card, in_graph, half or 'fp32', batch, sizes, alone=int8 == 'dynamic')}\n\n"
        f"In this folder, with onnxruntime and Pillow installed, these lines load the model; then {_use(names[0])}:\n\n"
        f"{code}\n"
        f"{card_sections(card, in_graph=in_graph, outputs=tuple(names))}"
    )


def onnx_code(card: Card, *, names: Sequence[str], half: str, in_graph: bool = False, batch: int | None = None) -> str:
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
    outputs = [
        "def run(path):  # the outputs for one image, by their names",
        f"    names = {list(names)}",
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
        parts.append(classify_code(card, f'run(path)["{names[0]}"][0]', name=names[0]))
    return code_block(*parts)


def _use(output: str) -> str:
    if output == "features":
        return '`run("photo.jpg")["features"]` gives the features of an image'
    return '`classify("photo.jpg")` gives the classes of an image with their probabilities, the most likely first'


def _facts(
    card: Card,
    in_graph: bool,
    kind: str,
    batch: int | None,
    sizes: Sizes | None,
    *,
    alone: bool = False,
    sides: str = "",
) -> str:
    """Return the sentences that say what the input is, and what becomes of other inputs.

    Args:
        alone: an image's outputs depend on the others in its call.
        sides: in place of the card's height and width.
    """
    spec = card.input
    count = "any number of images, one or more" if batch is None else f"exactly {batch} image{'s' * (batch > 1)}"
    if in_graph:
        shape = "(batch, height, width, 3), of any size"
        name, kind = "images", RAW_TYPES[spec.value_type].lower()
    else:
        sides = sides or ("height, width" if sizes else f"{spec.height}, {spec.width}")
        name, shape = "pixel_values", f"(batch, {spec.in_chans}, {sides})"
    text = f"Input: `{name}`, {kind}, {shape}; {count} at once, all of one size."
    if alone and batch != 1:
        text += " Run one image a call: the outputs of an image depend on the others in its call."
    if sizes and not sizes.free:
        text += (
            f" The height is a multiple of {sizes.step[0]}, at least {sizes.least[0]}; the width a multiple of "
            f"{sizes.step[1]}, at least {sizes.least[1]}. Other sizes end the run with an error."
        )
    if not in_graph:
        text += (
            " ONNX Runtime refuses other types and shapes; memory layout does not matter, but numbers in another "
            'byte order than the machine\'s are misread (`array.astype(array.dtype.newbyteorder("="))` first).'
        )
    return text


def tensorrt_page(card: Card, *, half: str, batch: int | None, version: str) -> str:
    """Return the page of a TensorRT folder: how the engine is built, and the same graph in ONNX Runtime.

    Args:
        card: of the model.
        half: ``fp16`` or ``bf16`` where inputs and outputs are of that type, else nothing.
        batch: fixed number of images, None for the range in ``profile.json``.
        version: of TensorRT.
    """
    return (
        f"{TENSORRT}{span(card.model.name)}\n\n"
        f"`bash build.sh`, or `python build_engine.py`, builds `model.engine` of `model.onnx` with TensorRT {version} "
        "or newer, on the GPU that is to run it: an engine is for one GPU and one version. From Python, "
        "`build_engine.load_engine()` returns it, after a look at its stamp. `profile.json` has the range of batch "
        f"sizes; TensorRT refuses others. `bash compare.sh` compares it with ONNX Runtime.\n\n"
        f"{_facts(card, False, half or 'fp32', batch, None)}\n\n"
        "Without TensorRT, in this folder, with onnxruntime and Pillow installed, these lines load the graph that the "
        f"engine is built of; then {_use('logits')}:\n\n"
        f"{onnx_code(card, names=('logits',), half=half, batch=batch)}\n{card_sections(card)}"
    )


def tasks_page(
    cards: Mapping[str, Card], *, files: bool, gathered: bool, options: Mapping[str, str], batch: int | None
) -> str:
    """Return the page of a folder of several tasks.

    Args:
        cards: by the tasks' names, in the order of their numbers.
        files: each task has a file, ``NAME.onnx``.
        gathered: ``gathered.onnx`` answers for all of them.
        options: entries of the sessions without which each copies the shared weights.
        batch: fixed number of images, None for any.
    """
    code = [
        "import json\n\nimport numpy as np\nimport onnxruntime\n\n"
        'with open("tasks.json", encoding="utf-8") as file:\n    tasks = json.load(file)["tasks"]',
        preparations(cards),
    ]
    what = []
    if gathered:
        what.append(
            "`gathered.onnx` takes `pixel_values` and `task`, int32 (batch,), the number of each image's task, and "
            "gives `logits`, as wide as the task with most classes needs, and `num_classes`."
        )
        code.append(
            'gathered = onnxruntime.InferenceSession("gathered.onnx", providers=["CPUExecutionProvider"])\n\n\n'
            "def run_gathered(path, task):  # the logits of one image; images of several tasks may be in one call\n"
            '    number = np.array([tasks[task]["number"]], np.int32)\n'
            '    inputs = {"pixel_values": prepare[task](path), "task": number}\n'
            '    logits, count = gathered.run(["logits", "num_classes"], inputs)\n'
            "    return logits[0, : count[0]]"
        )
    if files:
        what.append("Each task has a file of its own, `TASK.onnx`; equal weights lie in one file beside them.")
        lines = (f"    options.add_session_config_entry({key!r}, {value!r})\n" for key, value in options.items())
        code.append(
            "def open_task(task):  # with this option the common weights are in memory once for all tasks\n"
            f"    options = onnxruntime.SessionOptions()\n{''.join(lines)}"
            '    return onnxruntime.InferenceSession(tasks[task]["file"], options, '
            'providers=["CPUExecutionProvider"])'
        )
        code.append(
            "sessions = {}\n\n\n"
            "def run(path, task):  # the logits of one image\n"
            "    if task not in sessions:\n        sessions[task] = open_task(task)\n"
            '    return sessions[task].run(["logits"], {"pixel_values": prepare[task](path)})[0][0]'
        )
    last = next(iter(cards))
    run = "run" if files else "run_gathered"
    code.append(
        f"def classify(path, task={last!r}):  # each class with its probability, the most likely first\n"
        f"    values = {run}(path, task).astype(np.float64)\n    shares = {shares_code(cards)}\n"
        '    return sorted(zip(tasks[task]["classes"], shares.tolist()), key=lambda pair: -pair[1])'
    )
    several = len({card.input.size for card in cards.values()}) > 1
    facts = _facts(cards[last], False, "fp32", batch, None, sides="height, width" * several)
    if several:
        facts += " Height and width are those of the task, below."
    parts = [
        f"{TASKS}\n\n{' '.join(what)} `tasks.json` says which file, number and classes a task has. "
        f"{facts}\n\n"
        "In this folder, with onnxruntime and Pillow installed, these lines define all that is needed; then "
        f'`classify("photo.jpg", task)` gives the classes of an image with their probabilities, the most likely first; '
        f"`task` is a name such as {span(repr(last))}:\n\n{code_block(*code)}"
    ]
    for name, card in cards.items():
        sections = re.sub("^## ", "### ", card_sections(card), flags=re.MULTILINE)
        parts.append(f"## Task {span(name)}\n\n{sections}")
    return "\n".join(parts)


def preparations(cards: Mapping[str, Card], *, raw: bool = False) -> str:
    """Return lines that define ``prepare``, the preprocessing of each task by its name; ``tasks`` is defined."""
    specs = list(dict.fromkeys(card.input for card in cards.values()))
    if len(specs) == 1:
        return f"{prepare_code(specs[0], raw=raw)}\n\n\nprepare = dict.fromkeys(tasks, prepare)"
    made = []
    for i, spec in enumerate(specs):
        names = [name for name, card in cards.items() if card.input == spec]
        inside = textwrap.indent(prepare_code(spec, raw=raw), "    ")
        made.append(f"def preprocessing_{i}():  # of {', '.join(map(repr, names))}\n{inside}\n\n    return prepare")
    table = "".join(f"    {name!r}: preprocessing_{specs.index(card.input)}(),\n" for name, card in cards.items())
    return SPACE.join([*made, f"prepare = {{\n{table}}}"])
