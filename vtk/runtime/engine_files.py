"""Reads TensorRT engines of `vtk export tensorrt` and the files beside them, and checks that they fit this machine.

An engine is machine code for one GPU and one version of TensorRT. Its stamp names them, and is compared with this
machine before the engine is loaded. It detects an engine that does not fit, not a malicious one.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtk.card import Card
from vtk.errors import DataError, UnavailableError
from vtk.formats import read_json
from vtk.runtime.export_facts import PRECISIONS, Facts
from vtk.runtime.source import ENGINES, Source
from vtk.runtime.weight_digests import file_digest

PROFILE = "profile.json"
"""Build settings of the export; they belong to an engine if both name the same model."""

_AGAIN = "run build_engine.py in its folder again"


@dataclass(frozen=True)
class Stamp:
    """TensorRT, GPU and files that an engine was built with.

    Attributes:
        tensorrt: version.
        gpu: name, as the driver gives it.
        compute_capability: of it, ``9.0``.
        engine_sha256: of the engine.
        onnx_sha256: of the model that it was built from.
    """

    tensorrt: str
    gpu: str
    compute_capability: str
    engine_sha256: str
    onnx_sha256: str


def read_stamp(path: Path) -> Stamp:
    """Read ``ENGINE.json``.

    Raises:
        DataError: the file is absent or damaged.
    """
    file = stamp_path(path)
    if not file.is_file():
        raise DataError(
            f"{path} has no stamp {file.name} beside it, so it is unknown what it was built for; {_AGAIN} "
            "(--stamp after build.sh)"
        )
    found = read_json(file)
    names = Stamp.__dataclass_fields__
    if not isinstance(found, dict) or not all(isinstance(found.get(name), str) for name in names):
        raise DataError(f"{file} is not the stamp of an engine ({', '.join(names)}); {_AGAIN}")
    return Stamp(**{name: found[name] for name in names})


def stamp_path(engine: Path) -> Path:
    """Return the path of an engine's stamp."""
    return engine.with_name(f"{engine.name}.json")


def open_engine(path: Path) -> Source:
    """Read card, stamp and profile of an engine, without TensorRT.

    Raises:
        DataError: one of them is absent, damaged or of another model.
    """
    stamp, card_path = read_stamp(path), path.with_suffix(".json")
    if not card_path.is_file():
        raise DataError(f"{path} has no card {card_path.name} beside it; keep the files of an export together")
    card = Card.from_dict(read_json(card_path), card_path)
    profile = read_profile(path, stamp)
    if profile.get("card_sha256") not in (None, file_digest(card_path)):
        raise DataError(f"{card_path} is not the card that {path.name} was exported with; export and build it again")
    check_model(path, stamp)
    name = path.parent.name if path.stem == "model" and path.parent.name else path.name
    return Source(
        "tensorrt", name, path, card, facts=Facts(profile["precision"], names=profile.get("names", {})), trusted=True
    )


def read_profile(path: Path, stamp: Stamp) -> dict[str, Any]:
    """Read precision and shapes that an engine was built for.

    Raises:
        DataError: the file is absent or of another model.
    """
    file = path.with_name(PROFILE)
    found = read_json(file)
    known = isinstance(found, dict) and found.get("precision") in PRECISIONS and isinstance(found.get("tf32"), bool)
    if not known:
        raise DataError(f"{file} does not say in which precision {path.name} computes; export again")
    names = found.get("names", {})
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise DataError(f"{file} has `names` that are none; export again")
    if found.get("onnx_sha256") != stamp.onnx_sha256:
        raise DataError(f"{file} is of another model than {path.name} was built from; {_AGAIN}")
    return dict(found)


def engine_beside(source: Source) -> Path | None:
    """Return a source's engine: the source itself, or the engine beside an ONNX file."""
    if source.path is None or source.kind == "tensorrt":
        return source.path
    return next((p for p in map(source.path.with_suffix, ENGINES) if p.is_file()), None)


def check_model(path: Path, stamp: Stamp) -> None:
    """Refuse an engine beside another model than it was built from: it would run the old weights.

    Raises:
        DataError: the model beside it is another one.
    """
    model = path.with_suffix(".onnx")
    if model.is_file() and file_digest(model) != stamp.onnx_sha256:
        raise DataError(f"{path} was built from another {model.name} than the one beside it; {_AGAIN}")


def model_beside(path: Path, stamp: Stamp) -> Path | None:
    """Return the ONNX file that an engine was built from, if it is beside it unchanged."""
    file = path.with_suffix(".onnx")
    return file if file.is_file() and file_digest(file) == stamp.onnx_sha256 else None


def check_stamp(path: Path, stamp: Stamp, *, tensorrt: str, gpu: str, compute_capability: str) -> None:
    """Compare a stamp with this machine and the engine.

    Raises:
        UnavailableError: it was built for another TensorRT or GPU; names both.
        DataError: the engine is not the file that was stamped.
    """
    here = {"tensorrt": tensorrt, "gpu": gpu, "compute_capability": compute_capability}
    for name, value in here.items():
        if (made := getattr(stamp, name)) != value:
            raise UnavailableError(
                f"{path} was built for {name.replace('_', ' ')} {made}, here is {value}; {_AGAIN} on this machine"
            )
    if file_digest(path) != stamp.engine_sha256:
        raise DataError(f"{path} is not the file that {stamp_path(path).name} describes; {_AGAIN}")
