"""Writes the files beside a ``.pt2``: a loader for Python, an example for C++, and the README.md for both."""

import inspect
from pathlib import Path

from vtk.card import Card
from vtk.files import write_text
from vtk.markdown import span
from vtk.marks import begins
from vtk.packs.prepare_code import prepare_code
from vtk.packs.readme import card_sections, classify_code, code_block
from vtk.runtime import aoti_file, aoti_load
from vtk_export.aoti.cpp_example import BUILD, EXAMPLE
from vtk_export.output_folder import CARD, LATENCY

_TITLE = "# A compiled model (AOTInductor): "

_LOADER = begins('"""' + (aoti_load.__doc__ or "").partition("\n")[0])

MARKS = {
    "model.pt2": aoti_file.is_ours, "model.json": CARD, "load.py": _LOADER, "README.md": begins(_TITLE),
    "example.cpp": begins(EXAMPLE.partition("\n")[0]),
    "__pycache__/load.*.pyc": lambda path: _LOADER(path.parent.parent / "load.py"),  # Python leaves it at an import
    **LATENCY,
}  # fmt: skip
"""Files of an export and their recognisers; version 0.1 wrote ``model.pt2`` and ``model.json`` only."""
FILES = ("model.pt2", "model.json", "load.py", "README.md", "example.cpp")
"""Everything an export leaves in its folder."""


def write_beside(folder: Path, card: Card, precision: str, device: str) -> None:
    """Write the files beside a ``model.pt2``, except its card."""
    write_text(folder / "load.py", inspect.getsource(aoti_load))
    write_text(folder / "example.cpp", EXAMPLE)
    write_text(folder / "README.md", readme(card, precision, device))


def python_code(card: Card) -> str:
    """Return the code of the README, which defines ``classify(path)``."""
    head = (
        "import json\n\nimport torch\n\nfrom load import load\n\n"
        "model = load()  # model.pt2 beside load.py\n"
        'with open("model.json", encoding="utf-8") as file:\n    classes = json.load(file)["classes"]'
    )
    images = "torch.from_numpy(prepare(path)).to(model.device, model.dtype)"
    return "\n\n\n".join(
        [head, prepare_code(card.input), classify_code(card, f"model({images})[0].float().cpu().numpy()")]
    )


def readme(card: Card, precision: str, device: str) -> str:
    """Return the README.md of an export."""
    spec, gpu, most = card.input, device == "cuda", f"{aoti_file.MAX_BATCH:,}"
    machine = "a GPU of the kind" if gpu else f"a CPU with at least the instructions ({aoti_file.cpu_level()})"
    dtype = str(aoti_load.DTYPES[precision]).removeprefix("torch.")
    build = BUILD.format(cuda=" -ltorch_cuda -lc10_cuda" if gpu else "")
    return f"""{_TITLE}{span(card.model.name)}

`model.pt2` runs with torch {aoti_file.torch_release()} and {machine} that it was compiled for. It takes images
(B, {spec.in_chans}, {spec.height}, {spec.width}) in {dtype}, B from 1 to {most}, and gives logits
(B, {len(card.classes)}).

**Load it with `load.py`, or as `example.cpp` does: loading it in another way is unsafe.** Compiled code does not look
at its input. Images in another memory layout (channels_last, transposed) get wrong classes; another type, size or
number of channels is answered from memory that is not the image's; an empty batch ends the process.

## Python

With this folder as the current one, or on Python's path. torch, NumPy and Pillow are needed; `load.py` itself needs
torch alone.

{code_block(python_code(card))}
`classify("photo.jpg")` gives the classes of an image, the most likely first. `model(images)` takes any memory layout,
refuses what it was not compiled for with a TypeError or ValueError that says why, and may be called from several
threads: the calls follow each other, and each uses torch's threads. Start other processes with `spawn` and load it in
each: torch's threads do not survive a `fork`.

## C++

`example.cpp` reads prepared images from a file and prints the most likely class of each.

```sh
{build}```

## Inside

`model.pt2` holds two models: `batch_1` takes exactly one image, `batch_n` takes 2 to {most}. None has the default
name, so that none is loaded by chance. The environment variable `AOTI_RUNTIME_CHECK_INPUTS=1` lets each check its
input. A model reads it once, at its first call: it is set before, and proven by a call that must be refused. Types,
sizes and strides are checked, but neither the number of dimensions nor a pending change of sign: give a plain copy of
4 dimensions, as both programs do.

{card_sections(card)}"""
