"""Datasets of timm's readers: ``torch/cifar10``, ``hfds/beans``, ``wds@FOLDER``, ``tfds/oxford_flowers102``.

They are read once with `timm.data.create_dataset` and written as a folder of images below ``$VTK_HOME/datasets``, which
is then used like any other folder: audited, shuffled by the seed, resumed and evaluated file by file, which streams do
not allow. Encoded bytes from a reader are stored unchanged; decoded images become PNG files.

``NAME@FOLDER`` gives the folder where a dataset is stored; for ``wds`` the folder of the ``.tar`` shards. Packages are
imported when a dataset needs them: ``datasets`` for hfds, ``webdataset`` for wds, ``tensorflow_datasets``
for tfds.
"""

import contextlib
import hashlib
import importlib.util
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from vtk import console, files, formats
from vtk.data.decoding.images import FORMATS
from vtk.errors import DataError, UnavailableError, UsageError
from vtk.readers import reading

PREFIXES = {"torch": "torchvision", "hfds": "datasets", "wds": "webdataset", "tfds": "tensorflow_datasets"}
"""Prefix → package that reads such datasets."""

MARK = "dataset.json"
"""File that `fetch` writes beside the images."""

_SUFFIXES = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp", "BMP": ".bmp", "GIF": ".gif", "TIFF": ".tif"}
_UNSAFE = re.compile(r'[/\\:*?"<>|\x00-\x1f]')
_VAL_SPLITS = ("validation", "valid", "val", "test")


def is_named(path: Path) -> bool:
    """Return whether ``path`` is the name of a dataset; an existing folder of that name takes precedence."""
    return path.as_posix().partition("@")[0].partition("/")[0].lower() in PREFIXES and not path.exists()


def is_fetched(folder: Path) -> bool:
    """Return whether `fetch` wrote a folder."""
    return (folder / MARK).is_file() and folder.resolve().is_relative_to((files.home() / "datasets").resolve())


def fetch(name: Path) -> Path:
    """Return the folder of a dataset, written on first use.

    Raises:
        UsageError: the name is incomplete.
        UnavailableError: a needed package is not installed.
        DataError: it cannot be read, or has no labels.
    """
    text, _, root = name.as_posix().partition("@")
    kind, _, rest = text.partition("/")
    kind = kind.lower()
    if kind == "wds" and not root:
        raise UsageError(f"`{text}`: needs the folder of the shards; give wds@FOLDER with .tar files")
    if kind != "wds" and not rest:
        raise UsageError(f"`{text}` is not the name of a dataset; give for example torch/cifar10 or hfds/beans")
    if kind == "torch" and rest.lower() in ("image_folder", "folder"):
        raise UsageError(f"`{text}` is a folder of images; give that folder itself")
    where = os.path.abspath(root) if root else ""
    key = hashlib.sha256(f"{kind}/{rest}@{where}".encode("utf-8", "surrogateescape")).hexdigest()[:16]
    base = files.home() / "datasets"
    folder = base / key / (_UNSAFE.sub("_", rest.rpartition("/")[2]) or Path(where).name or kind)
    if (folder / MARK).is_file():
        return folder
    if importlib.util.find_spec(PREFIXES[kind]) is None:
        package = PREFIXES[kind].replace("_", "-")
        raise UnavailableError(f"`{text}` needs {package}, which is not installed: pip install {package}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    try:
        with _alone():
            counts = _write(part, kind, f"{kind}/{rest}", where or str(base / kind))
        formats.write_json(part / MARK, {"name": f"{kind}/{rest}", "root": where, "images": counts})
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    except OSError as error:
        raise DataError(f"`{text}`: {error.filename or folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hide the other processes of a run: a reader of timm that sees them hands out this process's share only."""
    import torch.distributed

    own = torch.distributed.is_initialized
    torch.distributed.is_initialized = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_initialized = own


def _write(folder: Path, kind: str, name: str, root: str) -> dict[str, int]:
    """Write train/ and, where the set has one, val/; return how many images each got."""
    counts = {"train": _write_part(folder / "train", name, _open(kind, name, root, ("train",)))}
    try:
        held_out = _open(kind, name, root, _VAL_SPLITS)
    except DataError:
        console.say(f"{name} has no held-out part: one is split off from train")
        return counts
    return counts | {"val": _write_part(folder / "val", name, held_out)}


def _open(kind: str, name: str, root: str, splits: Sequence[str]) -> list[Any]:
    """Return timm's datasets of the first of ``splits`` that there is; of shards one for each file."""
    from timm.data import create_dataset

    if kind == "wds":
        shards = sorted(path.name for path in Path(root).glob("*.tar"))
        for split in splits:
            if of_split := [shard for shard in shards if split in re.split(r"[^a-z]+", shard.lower())]:
                return [create_dataset(name, root, split=shard) for shard in of_split]
        raise DataError(f"{root} has no .tar files of {splits[0]} among {len(shards)}; name them like train-000.tar")
    problem: Exception | None = None
    for split in splits:
        try:
            options = {"download": True} if kind in ("torch", "tfds") else {}
            with contextlib.redirect_stdout(sys.stderr):  # readers print; stdout may be one JSON object
                return [create_dataset(name, root, split=split, **options)]
        except ImportError as error:
            what = " ".join(str(error).split())
            raise UnavailableError(f"`{name}` cannot be read: {what}; install what {PREFIXES[kind]} needs") from error
        except Exception as error:  # each package has its own for a split, a name or a network that is not there
            problem = problem or error
    text = " ".join(str(problem).split())[:300] or type(problem).__name__
    raise DataError(f"`{name}` cannot be opened ({splits[0]}): {text}; check the name and the network")


def _write_part(folder: Path, name: str, parts: Sequence[Any]) -> int:
    labels: dict[Any, str] = {}
    names = _class_names(parts[0])
    count = 0
    with console.progress(f"read {name} {folder.name}", sum(_length(part) for part in parts)) as bar:
        for image, label in _guarded(name, parts):
            if label not in labels:
                labels[label] = _folder_name(name, label, names)
                (folder / labels[label]).mkdir(parents=True, exist_ok=True)
            _save(folder / labels[label] / f"{count:08d}", image)
            count += 1
            bar.advance()
    if not count:
        raise DataError(f"`{name}` has no images to put into {folder.name}/")
    return count


def _guarded(name: str, parts: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield what all parts hold; what reads them raises anything where a shard is damaged."""
    items = (item for part in parts for item in _items(part))
    while True:
        with reading(f"`{name}`", "cannot be read to its end", "is a file of it damaged?"):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def _items(part: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (image or bytes, label), bytes where the reader does not decode."""
    reader = getattr(part, "reader", None)
    if reader is not None and hasattr(reader, "__getitem__"):
        for i in range(len(reader)):
            item = reader[i]
            with item[0] as stream:
                yield stream.read(), item[1]
    elif hasattr(part, "__getitem__") and reader is None:
        yield from (part[i] for i in range(len(part)))
    else:
        yield from ((item[0], item[1]) for item in part)


def _length(part: Any) -> int:
    try:
        return len(part)
    except (TypeError, NotImplementedError):
        return 0


def _class_names(part: Any) -> dict[int, str]:
    """Return label → class name, empty where the set tells none."""
    reader = getattr(part, "reader", part)
    for source in (reader, part):
        known = getattr(source, "class_to_idx", None)
        if isinstance(known, dict) and known:
            return {int(label): str(name) for name, label in known.items()}
    return {}


def _folder_name(name: str, label: Any, names: dict[int, str]) -> str:
    try:
        number = int(label)
    except (TypeError, ValueError) as error:
        raise DataError(f"`{name}` has the label {label!r}, which is no class number; it cannot be used") from error
    if number < 0:
        raise DataError(f"`{name}` has images without a label; give a labelled dataset")
    text = _UNSAFE.sub("_", names.get(number, str(number))).strip()
    return f"_{text}" if text.startswith(".") or not text else text


def _save(stem: Path, image: Any) -> None:
    if isinstance(image, bytes):
        suffix = ".jpg"  # also of what is no image, so that the audit names it
        with (
            contextlib.suppress(OSError, SyntaxError, ValueError),
            Image.open(io.BytesIO(image), formats=FORMATS) as opened,
        ):
            suffix = _SUFFIXES.get(str(opened.format), suffix)
        stem.with_suffix(suffix).write_bytes(image)
        return
    image.save(stem.with_suffix(".png"), compress_level=1)
