"""Writes the files beside the weights of a model: server code, client, labels, warm-up data and config."""

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vtk import files
from vtk.card import Card
from vtk.data import decoding
from vtk.formats import write_json
from vtk_export.readme import README
from vtk_export.tasks.index import temperature_entry
from vtk_export.triton.pbtxt import CONFIG, LABELS, WARMUP_TASK, names_in, write_text
from vtk_export.triton.publish import DECODING, forbid_bytecode
from vtk_export.triton.readme import describe, model_page

_SERVED = Path(__file__).with_name("served")
_LIVE = ("vtk_rows.py", "vtk_index.py", "vtk_watch.py", "vtk_counters.py")
"""Of a model whose tasks come and go."""


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_CODE = {
    "python": {"tasks_model.py": "model.py", **_same("vtk_rows.py", "vtk_counters.py", "vtk_prepack.py")},
    "factors": {"factors_model.py": "model.py", **_same(*_LIVE, "vtk_factors.py")},
    "openvino": {"openvino_model.py": "model.py", **_same("vtk_rows.py", "vtk_counters.py")},
    "vtk": {"bank_model.py": "model.py", **_same(*_LIVE)},
    "preprocess": {"preprocess_model.py": "model.py", **_same("vtk_rows.py", "vtk_index.py", "vtk_images.py")},
}
_CLIENT = ("client.py", "vtk_images.py")
_DECODES = ("preprocess",)
IMAGES = ("encoded", "images", "pixel_values")
"""What a model may take images by; a client sends the first of them that there is."""


def write_code(version: Path, server: str) -> None:
    """Copy the model that the server's Python back-end runs."""
    for name, content in _code(server).items():
        (version / name).write_bytes(content)
    forbid_bytecode(version)


def same_code(version: Path, server: str) -> bool:
    """Return whether a version runs the code that `write_code` would put there."""
    return all((version / name).is_file() and (version / name).read_bytes() == content
               for name, content in _code(server).items())  # fmt: skip


def _code(server: str) -> dict[str, bytes]:
    found = {name: (_SERVED / source).read_bytes() for source, name in _CODE[server].items()}
    return found | (decoding_code() if server in _DECODES else {})


def decoding_code() -> dict[str, bytes]:
    """Return the decoding modules of vtk as served copies, by file name."""
    served = {module: name.removesuffix(".py") for name, module in DECODING.items()}
    found = {}
    for name, module in DECODING.items():
        text = Path(decoding.__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
        text = re.sub(r"from vtk\.data\.decoding\.(\w+)", lambda match: f"from {served[match[1]]}", text)
        found[name] = text.encode()
    return found


def write_model_files(folder: Path, config: Any, cards: Mapping[str, Card], outputs: Sequence[str]) -> None:
    """Write the client, labels and warm-up data, and last the config.

    Args:
        folder: of the model.
        config: its message.
        cards: of its tasks.
        outputs: names of its outputs that clients ask for.
    """
    called = names_in(config)
    terms = {called.get(term, term): term for term in (*IMAGES, "task", *called)}
    names = {terms.get(entry.name, entry.name): entry for entry in config.input}
    for name in _CLIENT:
        shutil.copyfile(_SERVED / name, folder / name)
    for name, content in decoding_code().items():
        (folder / name).write_bytes(content)
    kind = config.input[0].DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    source = next(name for name in IMAGES if name in names)
    image = names[source]
    datatype = kind[image.data_type].name.removeprefix("TYPE_")
    numbered = any(kind[entry.data_type].name == "TYPE_INT32" for name, entry in names.items() if name == "task")
    numbers = {"task_numbers": {name: i for i, name in enumerate(cards)}} if numbered else {}
    about = {
        "model": config.name,
        "input": source,
        "datatype": "BYTES" if datatype == "STRING" else datatype,
        "has_task": "task" in names,
        **numbers,
        "static_batch": 0 if config.max_batch_size else max(image.dims[0], 0),
        "outputs": [terms.get(name, name) for name in outputs],
        **({"names": called} if called else {}),
        "tasks": {name: _task(card) for name, card in cards.items()},
    }
    write_json(folder / "client.json", about)
    kinds = {entry.name: describe(entry, kind[entry.data_type].name, batched=config.max_batch_size > 0)
             for entry in (*config.input, *config.output)}  # fmt: skip
    files.write_text(folder / README, model_page(about, cards, config, kinds))
    if any(entry.label_filename for entry in config.output):
        text = label_lines(next(iter(cards.values())).classes)
        (folder / LABELS).write_bytes(text.encode("utf-8", "surrogateescape"))
    if "task" in names and config.model_warmup and not numbered:
        task = next(iter(cards)).encode()
        (folder / "warmup").mkdir()
        (folder / "warmup" / WARMUP_TASK).write_bytes(len(task).to_bytes(4, "little") + task)
    (folder / CONFIG).write_text(write_text(config), encoding="utf-8", newline="\n")


def _task(card: Card) -> dict[str, Any]:
    several = {"multi_label": True} if card.multi_label else {}
    return {"input": card.input.to_dict(), "classes": list(card.classes), **several, **temperature_entry(card)}


def label_lines(classes: Sequence[str]) -> str:
    """Return the label file: the i-th line names the i-th class.

    What would end a line is written as an escape, since every later line would else name another class.
    """
    return "".join(f"{_one_line(name)}\n" for name in classes)


def _one_line(name: str) -> str:
    # a lone surrogate stands for a byte of a folder's name that is not UTF-8; it is written back as that byte
    keep = (c if c.isprintable() or 0xDC80 <= ord(c) <= 0xDCFF else c.encode("unicode_escape").decode() for c in name)
    return "".join(keep)
