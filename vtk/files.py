"""Files that are either whole or absent: write to a temporary name, flush, then rename."""

import contextlib
import ctypes
import errno
import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from vtk.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_WRITE_ERRORS = (OSError, SafetensorError, RuntimeError)
_LONGEST_HEADER = 32 << 20
_DEEPEST = 64
"""Levels of nested JSON: what this toolkit writes has five; to copy or print hundreds would exhaust the stack."""


def home() -> Path:
    """Return the toolkit's own folder: ``$VTK_HOME``, by default ``~/.vit-toolkit``. It need not exist."""
    return Path(os.environ.get("VTK_HOME") or "~/.vit-toolkit").expanduser()


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it takes the place of ``path``, on error it is deleted.

    Raises:
        DataError: the folder cannot be written or the disk is full.
    """
    tmp = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield tmp
        _fsync(tmp)
        os.replace(tmp, path)
        _fsync(path.parent)
    except _WRITE_ERRORS as error:
        if (reason := _write_failure(error)) is None:
            raise
        raise DataError(f"cannot write {path}: {reason}") from error
    finally:
        with contextlib.suppress(OSError):
            tmp.unlink(missing_ok=True)


@contextlib.contextmanager
def replace_dir(path: Path, *, beside: Path | None = None) -> Iterator[Path]:
    """Yield an empty temporary folder beside ``path``; on success it takes the place of ``path`` as a whole.

    Where the system can exchange two names at once (Linux), ``path`` names either the old or the new folder at every
    moment. Elsewhere the old one is first moved to ``path.old``, which `existing_dir` falls back to.

    Args:
        path: the folder.
        beside: folder of the temporary names, on the same file system, where nothing else may stand beside ``path``.

    Raises:
        DataError: the folder cannot be written or the disk is full.
    """
    tmp = (beside or path.parent) / f"{path.name}.tmp-{os.getpid()}"
    old = (beside or path.parent) / f"{path.name}.old"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if tmp.exists():
            shutil.rmtree(tmp)
        tmp.mkdir()
        yield tmp
        for file in sorted(tmp.rglob("*"), reverse=True):
            _fsync(file)
        _fsync(tmp)
        if not path.exists():
            os.replace(tmp, path)
            shutil.rmtree(old, ignore_errors=True)
        elif not _exchange(tmp, path):
            shutil.rmtree(old, ignore_errors=True)
            os.replace(path, old)
            os.replace(tmp, path)
            shutil.rmtree(old, ignore_errors=True)
        _fsync(path.parent)
    except _WRITE_ERRORS as error:
        if (reason := _write_failure(error)) is None:
            raise
        raise DataError(f"cannot write {path}: {reason}") from error
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def existing_dir(path: Path) -> Path:
    """Return ``path``, or ``path.old`` when a writer was stopped between its two renames."""
    old = path.with_name(f"{path.name}.old")
    return old if not path.exists() and old.is_dir() else path


def sweep(folder: Path, own: Callable[[str], bool], *, age: float = 0.0) -> None:
    """Delete the temporary files and folders of writers that were killed.

    Args:
        folder: that they wrote to.
        own: tells whether a name was one to be written there, so that nothing of a stranger is touched.
        age: seconds since the last change below which nothing is deleted: the writer may be on another machine, where
            its number is not known to be alive.
    """
    import psutil

    for left in folder.glob("*.tmp-*"):
        name, _, pid = left.name.rpartition(".tmp-")
        if not own(name) or not pid.isdecimal() or psutil.pid_exists(int(pid)):
            continue
        with contextlib.suppress(OSError):  # another process sweeps, too
            if time.time() - left.stat().st_mtime < age:
                continue
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, whole or not at all."""
    with replace_file(path) as tmp:
        tmp.write_text(text, encoding="utf-8", errors="surrogateescape", newline="\n")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON; NaN and infinity are refused, since other readers would stumble over them."""
    write_text(path, to_json(value, indent=2, allow_nan=False) + "\n")


def to_json(value: Any, **options: Any) -> str:
    """Return JSON that is readable text, escaped where a file name is not UTF-8 and could not be written otherwise."""
    text = json.dumps(value, ensure_ascii=False, **options)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, **options)
    return text


def read_json(path: Path, limit: int = 64 << 20) -> Any:
    """Read JSON of at most ``limit`` bytes.

    Raises:
        DataError: the file is absent, no plain file, too large or not JSON (`parse_json`).
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would wait for ever, a device never end
            raise DataError(f"{path} is no plain file; a file of this kind is JSON")
        if found.st_size > limit:
            raise DataError(f"{path} has {found.st_size:,} bytes; a file of this kind has at most {limit:,}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON ({error}); was it edited or cut short?") from error
    return parse_json(text, path)


def parse_json(text: str, where: str | Path) -> Any:
    """Return the value of JSON that others may have written; ``where`` names it in messages.

    Raises:
        DataError: it is not JSON, names a key twice (readers differ in which one they take), or is nested too deeply.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON ({error}); was it edited or cut short?") from error
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


def check_safetensors(path: Path) -> None:
    """Refuse a safetensors file whose header a reader would wait for, take for another one, or choke on.

    Only the header is read: eight bytes with its length, then JSON.

    Raises:
        DataError: no plain file, cut short, or with a header that `parse_json` refuses.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError(f"{path} is no plain file; a file of this kind is safetensors")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if size < 8 or not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise DataError(
                    f"{path} is not a whole safetensors file: its header would take {length:,} of {size:,} bytes; was "
                    "it cut short, or is it of another kind?"
                )
            text = file.read(length).decode("utf-8")
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a whole safetensors file: its header is no text; was it damaged?") from error
    parse_json(text, f"the header of {path}, not a whole safetensors file,")


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice[:60]!r} is there twice")
    return result


def prepare_output(path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
    """Make sure that results can go to ``path`` without mixing with something else.

    Raises:
        DataError: ``path`` is a file, a folder that is not empty and neither flag was given, or cannot be written.
    """
    if path.exists() and not path.is_dir():
        raise DataError(f"`--out` {path} is a file; give a folder")
    try:
        if path.is_dir() and any(path.iterdir()) and not (overwrite or resume):
            raise DataError(f"`--out` {path} is not empty; give another folder, or --overwrite")
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot make the folder {path}: {error.strerror or error}") from error
    check_writable(path)


def check_writable(folder: Path) -> None:
    """Refuse a folder that is read-only, before hours of work whose results could not be kept.

    Raises:
        DataError: it, or the disk it is on, is read-only.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DataError(f"cannot write {folder}: the folder or its disk is read-only; choose another folder")


def _write_failure(error: Exception) -> str | None:
    """Return why a file could not be written, and what to do; None if that was not what failed.

    safetensors and torch.save raise kinds of their own on a full disk.
    """
    text = " ".join(str(error).split())
    if isinstance(error, SafetensorError):
        if "I/O error" not in text:
            return None
        reason = text.rpartition("I/O error: ")[2].partition(" (os error")[0]
    elif isinstance(error, OSError):
        reason = error.strerror or text
    elif "PytorchStreamWriter" in text or "unexpected pos" in text:
        reason = "the disk is full or went away"
    else:
        return None
    readonly = reason in [os.strerror(number) for number in (errno.EROFS, errno.EACCES, errno.EPERM)]
    return f"{reason}; {'' if readonly else 'free some space or '}choose another folder"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


_MODE = 0o666 & ~_umask()


def _fsync(path: Path) -> None:
    """Flush a file or folder to the disk, files readable as the user's umask says (safetensors makes them private).

    Windows cannot open folders, so there it is left to the system.
    """
    if path.is_dir():
        if os.name == "nt":
            return
    else:
        path.chmod(_MODE)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0
