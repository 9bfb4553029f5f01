"""The steps of the demo, by the functions behind the commands."""

import time
from pathlib import Path
from typing import Any

from vtk import console, filesets, formats
from vtk.bank.config import BenchConfig
from vtk.bank.synthetic_bench import bench_synthetic
from vtk.commands._bench_tasks import print_synthetic
from vtk.data.digits import write_digits
from vtk.errors import VerificationError
from vtk.marks import json_with
from vtk.packs.cards import pack_bytes
from vtk.packs.config import CompressConfig
from vtk.packs.diff import Diff, diff_task
from vtk.packs.merge import merge_task
from vtk.profiling.config import ProfileConfig
from vtk.profiling.profile import profile
from vtk.profiling.report import print_result
from vtk.runtime.compression import compress_task
from vtk.runtime.opening import open_source
from vtk.training.engine.result import FinetuneResult
from vtk.training.finetune import finetune
from vtk.training.finetune_config import FinetuneConfig
from vtk_export.onnx.config import OnnxConfig
from vtk_export.onnx.export import export_onnx

MODEL = "vit_tiny_patch16_224"
MODEL_KWARGS = ("patch_size=8", "embed_dim=96", "depth=6", "num_heads=3")
FLOORS = {"base": 0.85, "digits": 0.85, "parity": 0.90}
"""Lowest held-out accuracy that passes; docs/start/tutorial.md lists measured ones."""

_MARK = "demo.json"
_IS_DEMO = json_with("finished")


def run(out: Path, *, seed: int = 0, overwrite: bool = False) -> int:
    """Run the demo into ``out`` and return 0.

    Raises:
        DataError: ``out`` holds other files.
        VerificationError: an accuracy is below its floor, packs do not share the FFN, or the ONNX file is wrong.
    """
    start = time.perf_counter()
    with filesets.open_folder(out, {_MARK: _IS_DEMO}, "vtk demo", overwrite=overwrite or _is_demo(out)):
        return _run(out, seed, start)


def _is_demo(out: Path) -> bool:
    """Return whether the folder holds an earlier demo, which is replaced."""
    return (out / _MARK).is_file() and _IS_DEMO(out / _MARK)


def _run(out: Path, seed: int, start: float) -> int:
    formats.write_json(out / _MARK, {"finished": False})

    _heading("1/6  a base: train all weights of a small ViT on handwritten digits")
    digits = write_digits(out / "data" / "digits", "digits")
    parity = write_digits(out / "data" / "parity", "parity")
    base = finetune(_config(digits, out / "base", seed, train="full", pretrained=False, img_size=32,
                            model_kwargs=MODEL_KWARGS, epochs=15, lr=1e-3))  # fmt: skip
    weights = out / "base.safetensors"
    merge_task(base.task, weights, overwrite=True)

    _heading("2/6  two tasks: fine-tune attention only, ten digits at 32 px, odd or even at 48 px")
    shared = {"weights": weights, "model_kwargs": MODEL_KWARGS, "train": "attn"}
    first = finetune(_config(digits, out / "digits", seed, img_size=32, epochs=2, lr=2e-4, **shared))
    second = finetune(_config(parity, out / "parity", seed, img_size=48, epochs=2, lr=3e-4, **shared))

    _heading("3/6  compare the two packs")
    diff = _shared(first, second)

    _heading("4/6  the digits as low-rank factors; a hundred tasks of random factors on this base")
    factors = compress_task(CompressConfig(pack=first.task, data=digits, out=out / "digits-factors", overwrite=True))
    many = bench_synthetic(BenchConfig(tasks=100, rank=(8,), pack=(first.task,), rounds=7, device="cpu", seed=seed))
    print_synthetic(many)

    _heading("5/6  export to ONNX, verified against PyTorch")
    config = OnnxConfig(out=out / "onnx", data=parity / "val", overwrite=True)
    exported = export_onnx(open_source(str(second.task)), config)

    _heading("6/6  measure latency per batch size")
    result = profile(
        second.task,
        ProfileConfig(backends=("eager", "ort-cpu"), duration=0.5, out=out / "profile", seed=seed, overwrite=True),
    )
    print_result(result)

    summary = _summary(out, weights, {"base": base, "digits": first, "parity": second}, diff)
    console.say()
    for what, path in _written(out, weights, first, second, exported.path):
        console.say(f"{what:<14} {path}")
    seconds = time.perf_counter() - start
    console.say(f"done in {seconds:.0f} s")
    report = {
        "finished": True, "seconds": seconds, "profile_exit_code": result.exit_code,
        "factors_bytes": factors.pack_bytes, "hundred": many.to_dict(), **summary,
    }  # fmt: skip
    formats.write_json(out / _MARK, report)
    _check(summary["top1"], result.exit_code)
    console.emit_json(report)
    return 0


def _config(data: Path, out: Path, seed: int, **options: Any) -> FinetuneConfig:
    """Return the options of a run; crops keep at least 80 % of an image, as digits fill theirs."""
    return FinetuneConfig(data=data, out=out, seed=seed, model=MODEL, crop_scale=(0.8, 1.0), workers=0,
                          device="cpu", overwrite=True, **options)  # fmt: skip


def _shared(first: FinetuneResult, second: FinetuneResult) -> Diff:
    diff = diff_task(first.task, second.task)
    console.say(f"{diff.shared_ffn} of {diff.total_ffn} FFN tensors are identical")
    if diff.shared_ffn != diff.total_ffn:
        raise VerificationError(
            f"only {diff.shared_ffn} of {diff.total_ffn} FFN tensors are identical; please report this"
        )
    return diff


def _summary(out: Path, weights: Path, runs: dict[str, FinetuneResult], diff: Diff) -> dict[str, Any]:
    """Print the closing table; sizes are those of the files."""
    full = weights.stat().st_size
    packs = {name: pack_bytes(runs[name].task) for name in ("digits", "parity")}
    rows = [("base, all weights", "32", console.percent(runs["base"].top1), "100.0 %", console.size(full))]
    for name, px in (("digits", "32"), ("parity", "48")):
        census = runs[name].census
        rows.append((f"{name}, attention only", px, console.percent(runs[name].top1),
                     console.percent(census.trained / census.total), console.size(packs[name])))  # fmt: skip
    console.say()
    console.table("results", ("model", "px", "top-1", "trained", "on disk"), rows)
    alone, together = 2 * full, full + sum(packs.values())
    console.say(
        f"two full checkpoints: {console.size(alone)}; one base and two packs: {console.size(together)}; each further "
        f"task adds {console.size(max(packs.values()))} in place of {console.size(full)}"
    )
    return {
        "top1": {name: run.top1 for name, run in runs.items()},
        "shared_ffn_tensors": diff.shared_ffn,
        "ffn_tensors": diff.total_ffn,
        "full_bytes": full,
        "packs_bytes": packs,
        "saved_per_task_bytes": full - max(packs.values()),
    }


def _written(
    out: Path, weights: Path, first: FinetuneResult, second: FinetuneResult, onnx: Path
) -> list[tuple[str, Path]]:
    return [
        ("base", weights), ("pack", first.task), ("pack", second.task), ("factors", out / "digits-factors"),
        ("curves", second.out / "curves.png"),
        ("ONNX", onnx), ("latency plot", out / "profile" / "latency.png"),
        ("HTML report", out / "profile" / "report.html"),
    ]  # fmt: skip


def _check(top1: dict[str, float], profile_code: int) -> None:
    low = [
        f"{name} {console.percent(top1[name])} (floor {console.percent(f)})"
        for name, f in FLOORS.items()
        if top1[name] < f
    ]
    if low:
        raise VerificationError(
            f"held-out accuracy is below its floor: {', '.join(low)}; please report this with the seed"
        )
    if profile_code:
        raise VerificationError("the outputs of a back-end differ from PyTorch's; see the table above")


def _heading(text: str) -> None:
    console.say()
    console.say(text, style="bold")
