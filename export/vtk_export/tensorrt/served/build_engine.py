"""Builds model.engine from model.onnx beside this file, stamps it, and loads it only where its stamp fits.

Needs TensorRT's Python package and an NVIDIA GPU, nothing else:

    python build_engine.py           build, stamp, and load once
    python build_engine.py --stamp   stamp the model.engine that build.sh has just made on this GPU
    python build_engine.py --check   load the engine that is there

From Python, `load_engine()` returns TensorRT's engine. An engine is machine code: load only one that you built.
Exit codes: 0 done, 3 the engine or a file is another one, 4 TensorRT cannot build it, 5 no TensorRT or no GPU here.
"""

from __future__ import annotations  # TensorRT 8.6 comes with old Pythons

import argparse
import ctypes
import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MODEL, ENGINE, PROFILE, CACHE = "model.onnx", "model.engine", "profile.json", "timing.cache"
STAMP, DATA = f"{ENGINE}.json", f"{MODEL}.data"


class Failed(Exception):
    """Says why in one line; ``code`` is the exit code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(" ".join(text.split()))
        self.code = code


def tensorrt() -> Any:
    """Import TensorRT, which takes a second and need not be here."""
    try:
        import tensorrt as trt  # type: ignore[import-not-found]
    except (ImportError, OSError) as error:
        raise Failed(5, f"TensorRT's Python package does not load here ({error}); pip install tensorrt") from error
    return trt


def gpu() -> dict[str, str]:
    """Return name and compute capability of the first GPU that this process sees, asked of the driver itself."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1" if os.name != "nt" else "nvcuda.dll")
    except OSError as error:
        raise Failed(5, "no NVIDIA driver here; an engine is built on the GPU that runs it") from error
    device, major, minor, name = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    failed = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0) or cuda.cuDeviceGetName(name, 256, device)
    for number, attribute in ((major, 75), (minor, 76)):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        failed = failed or cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
    if failed:
        raise Failed(5, f"the NVIDIA driver gives no GPU (CUDA error {failed}); is one free and visible?")
    return {"gpu": name.value.decode("utf-8", "replace"), "compute_capability": f"{major.value}.{minor.value}"}


def read(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object beside the model."""
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Failed(3, f"cannot read {folder / name}: {error}; build the engine again") from error
    if not isinstance(found, dict):
        raise Failed(3, f"{folder / name} holds no JSON object; build the engine again")
    return found


def digest(path: Path) -> str:
    """Return a file's SHA-256."""
    try:
        found = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                found.update(block)
        return found.hexdigest()
    except OSError as error:
        raise Failed(3, f"cannot read {path}: {error.strerror or error}") from error


def write(path: Path, data: Any) -> None:
    """Write bytes under another name first, so that ``path`` is never half a file."""
    tmp = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        tmp.write_bytes(data)
        os.replace(tmp, path)
    except OSError as error:
        raise Failed(3, f"cannot write {path}: {error.strerror or error}") from error
    finally:
        tmp.unlink(missing_ok=True)


def build(folder: Path = HERE) -> Path:
    """Build the engine and stamp it.

    Raises:
        Failed: TensorRT is missing or too old, or does not take the model.
    """
    trt, here, profile = tensorrt(), gpu(), read(folder, PROFILE)
    if _numbers(trt.__version__) < _numbers(profile["tensorrt"]):
        raise Failed(5, f"{MODEL} was made for TensorRT {profile['tensorrt']} or newer, {trt.__version__} is installed")
    check_model(folder, profile)
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network = builder.create_network(_flags(trt, strongly_typed=profile["strongly_typed"]))
    parser = trt.OnnxParser(network, logger)
    # by its path, so that weights in a file beside it are found
    if not parser.parse_from_file(str(folder / MODEL)):
        errors = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise Failed(4, f"TensorRT {trt.__version__} does not parse {MODEL}: {errors}")
    names = [network.get_input(i).name for i in range(network.num_inputs)]
    if names != list(profile["inputs"]):
        raise Failed(4, f"the parsed graph has the inputs {names}, {PROFILE} has {list(profile['inputs'])}")
    config = _config(trt, builder, profile)
    cache = _timing_cache(config, folder)
    made = builder.build_serialized_network(network, config)
    if made is None:
        raise Failed(4, f"TensorRT {trt.__version__} cannot build an engine; its messages above say why")
    (folder / STAMP).unlink(missing_ok=True)
    write(folder / ENGINE, made)
    write(folder / CACHE, cache.serialize())
    stamp(folder, trt.__version__, here)
    return folder / ENGINE


def check_model(folder: Path, profile: dict[str, Any]) -> None:
    """Hold the model and the weights beside it against what was exported.

    Raises:
        Failed: one of them is another file.
    """
    for name, key in ((MODEL, "onnx_sha256"), (DATA, "data_sha256")):
        if key in profile and digest(folder / name) != profile[key]:
            raise Failed(3, f"{name} is not the file that {PROFILE} was written for; export again")


def _flags(trt: Any, *, strongly_typed: bool) -> int:
    kinds = trt.NetworkDefinitionCreationFlag
    if _numbers(trt.__version__) < (10,):
        return 1 << int(kinds.EXPLICIT_BATCH)
    # 11 types strongly whatever the flag, and may lose it
    flag = getattr(kinds, "STRONGLY_TYPED", None)
    return 1 << int(flag) if strongly_typed and flag is not None else 0


def _config(trt: Any, builder: Any, profile: dict[str, Any]) -> Any:
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, profile["workspace_mib"] << 20)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if not profile["tf32"]:
        config.clear_flag(trt.BuilderFlag.TF32)
    ranges = {name: entry for name, entry in profile["inputs"].items() if entry["dynamic"]}
    if ranges:
        shapes = builder.create_optimization_profile()
        for name, entry in ranges.items():
            shapes.set_shape(name, *(tuple(entry[which]) for which in ("min", "opt", "max")))
        config.add_optimization_profile(shapes)
    return config


def _timing_cache(config: Any, folder: Path) -> Any:
    """Give the builder the times of an earlier build; those of another version or GPU are left."""
    path = folder / CACHE
    cache = config.create_timing_cache(path.read_bytes() if path.exists() else b"")
    if not config.set_timing_cache(cache, False):
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def stamp(folder: Path, version: str, here: dict[str, str]) -> None:
    """Write down what the engine was built with; it is of no use with anything else."""
    found = {
        "tensorrt": version,
        **here,
        "engine_sha256": digest(folder / ENGINE),
        "onnx_sha256": digest(folder / MODEL),
    }
    write(folder / STAMP, (json.dumps(found, indent=2) + "\n").encode())


def load_engine(folder: Path = HERE) -> Any:
    """Return TensorRT's engine.

    Raises:
        Failed: the engine was built with another version or GPU, or was changed, or does not load.
    """
    trt, here, found = tensorrt(), gpu(), read(folder, STAMP)
    for key, value in {"tensorrt": trt.__version__, **here}.items():
        if found.get(key) != value:
            raise Failed(3, f"{ENGINE} was built for {key} {found.get(key)}, here is {value}; run build_engine.py here")
    for name, key in ((ENGINE, "engine_sha256"), (MODEL, "onnx_sha256")):
        if found.get(key) != digest(folder / name):
            raise Failed(3, f"{name} is not the file that {STAMP} speaks of; run build_engine.py again")
    runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
    engine = runtime.deserialize_cuda_engine((folder / ENGINE).read_bytes())
    if engine is None:
        raise Failed(4, f"TensorRT {trt.__version__} does not load {ENGINE}; run build_engine.py again")
    return engine


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def main(argv: list[str] | None = None) -> int:
    """Build, stamp or check; return the exit code."""
    parser = argparse.ArgumentParser(description="model.onnx to a stamped TensorRT engine")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--stamp", action="store_true", help="stamp the engine that build.sh made on this GPU")
    way.add_argument("--check", action="store_true", help="load the engine that is there")
    options = parser.parse_args(argv)
    try:
        if options.stamp:
            check_model(HERE, read(HERE, PROFILE))
            if (HERE / ENGINE).exists() and (HERE / ENGINE).stat().st_mtime_ns < (HERE / MODEL).stat().st_mtime_ns:
                raise Failed(3, f"{ENGINE} is older than {MODEL}, so it is of another one; run build.sh again")
            stamp(HERE, tensorrt().__version__, gpu())
        elif not options.check:
            build()
        engine = load_engine()
    except Failed as error:
        print(f"build_engine.py: {error}", file=sys.stderr)
        return error.code
    found = read(HERE, STAMP)
    names = ", ".join(engine.get_tensor_name(i) for i in range(engine.num_io_tensors))
    print(f"{ENGINE}: TensorRT {found['tensorrt']}, {found['gpu']} ({found['compute_capability']}), tensors {names}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
