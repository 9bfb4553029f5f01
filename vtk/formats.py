"""JSON and safetensors: strict writers, and readers that check files others may have written or changed."""

import json
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtk.errors import DataError
from vtk.files import write_text
from vtk.readers import check_plain, reading

if TYPE_CHECKING:
    from torch import Tensor

_LONGEST_HEADER = 32 << 20
_JSON, _EDITED = "is not valid JSON", "was it edited or cut short?"
_DEEPEST = 64
"""Levels of nested JSON: what this toolkit writes has five; to copy or print hundreds would exhaust the stack."""


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON; NaN and infinity are refused, since many readers do not take them."""
    write_text(path, to_json(value, indent=2, allow_nan=False) + "\n")


def to_json(value: Any, **options: Any) -> str:
    """Return readable JSON; all is escaped if a file name in it is not valid UTF-8."""
    text = json.dumps(value, ensure_ascii=False, **options)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, **options)
    return text


def read_json(path: Path, limit: int = 64 << 20) -> Any:
    """Read JSON of at most ``limit`` bytes.

    Raises:
        DataError: the file is absent, not a regular file, too large or not JSON (`parse_json`).
    """
    with reading(path, _JSON, _EDITED):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would wait for ever, a device never end
            raise DataError(f"{path} is not a regular file; a file of this kind is JSON")
        if status.st_size > limit:
            raise DataError(f"{path} has {status.st_size:,} bytes; a file of this kind has at most {limit:,}")
        text = path.read_text(encoding="utf-8")
    return parse_json(text, path)


def parse_json(text: str, where: str | Path) -> Any:
    """Return the value of JSON that others may have written; ``where`` names it in messages.

    Raises:
        DataError: it is not JSON, names a key twice (readers differ in which one they take), or is nested too deeply.
    """
    with reading(where, _JSON, _EDITED):
        value = json.loads(text, object_pairs_hook=_unique)
    level = [value]
    for _ in range(_DEEPEST + 1):
        level = [inner for each in level for inner in _inside(each)]
        if not level:
            return value
    raise DataError(f"{where} is JSON of more than {_DEEPEST} levels, as no file of this kind is; was it edited?")


def save_tensors(path: Path, tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file; the format itself has no room for strides, and refuses tensors that share memory.

    Args:
        path: file, inside of a `replace_file` or `replace_dir`.
        tensors: by name; those with other strides or parts of a larger tensor are copied, no others.
        metadata: texts of the header.
    """
    from safetensors.torch import save_file

    taken: set[int] = set()
    whole = {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        storage = value.untyped_storage()
        if storage.data_ptr() in taken or storage.nbytes() > value.numel() * value.element_size():
            value = value.clone()
        taken.add(value.untyped_storage().data_ptr())
        whole[name] = value
    save_file(whole, path, metadata={"format": "pt", **(metadata or {})})
    if metadata:
        _sort_texts(path)


def _sort_texts(path: Path) -> None:
    """Sort the texts of a new file's header, which safetensors writes in any order: equal content, equal bytes."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        texts = sorted(header.pop("__metadata__").items())
        header = {"__metadata__": dict(texts), **header}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:  # the offsets of the tensors count from its end
            file.seek(8)
            file.write(text.ljust(length))


def check_safetensors(path: Path) -> None:
    """Refuse a safetensors file whose header is cut, oversized or invalid (`read_header`).

    Raises:
        DataError: not a regular file, cut short, or with a header that `parse_json` refuses.
    """
    read_header(path)


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: eight bytes with its length, then JSON; nothing else of it is read.

    Raises:
        DataError: not a regular file, cut short, or with a header that `parse_json` refuses.
    """
    check_plain(path, "safetensors")
    with reading(path, "is not a whole safetensors file", "was it damaged?"), path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = path.stat().st_size
        if size < 8 or not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            raise DataError(
                f"{path} is not a whole safetensors file: its header would take {length:,} of {size:,} bytes; was it "
                "cut short, or is it of another kind?"
            )
        text = file.read(length).decode("utf-8")
    header = parse_json(text, f"the header of {path}, not a whole safetensors file,")
    if not isinstance(header, dict):
        raise DataError(f"{path} is not a whole safetensors file: its header is no JSON object; was it damaged?")
    return header


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice[:60]!r} is there twice")
    return result
