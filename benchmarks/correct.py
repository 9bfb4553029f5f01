"""Stage ``correct``: every kernel and every fused model in half precision against fp64.

An error may be twice that of plain torch in the same type, no more. Each unit (one operation, one model) runs in a
process of its own: units compile side by side, and a kernel that breaks its CUDA context takes no other with it.

    benchmarks/gpu.sh correct --out DIR
"""

import argparse
import copy
import functools
import importlib
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import _choices
import _rows
import _stage
import torch
from _models import CHECKED
from _runner import DTYPES, Bench, Case, Inputs, as_tuple, relative_error
from _store import Deadline, Store, finish
from _units import ALONE, TESTS, gpu_tests, run_tests, run_units, test_key
from torch import Tensor

KEY = ("unit", "case", "dtype")
BENCHES = ("norm", "add_norm", "context_broadcast", "linear", "linear_residual", "linear_gelu", "linear_swiglu",
           "packed_attention", "rotary_attention", "grouped_linear", "grouped_low_rank", "patchify",
           "splitk_linear", "residual")  # fmt: skip
"""In this order, then any others."""

TYPES = ("bf16", "fp16")
FORMS = {"": False, "folded: ": True}
"""Beginning of a model's cases to its form: norms as kernels of their own, or folded into the products."""
LARGEST = 400_000_000
Row = dict[str, object]


def benches() -> dict[str, Bench]:
    """Return the operations, by name: all that the files ``bench_*.py`` declare."""
    here = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
    modules = [importlib.import_module(f"bench_{name}") for name in dict.fromkeys((*BENCHES, *here))]
    return {b.op: b for m in modules for b in vars(m).values() if isinstance(b, Bench)}


def red_ops(out: Path, device: torch.device) -> set[str]:
    """Return the operations of which a comparison by this code failed."""
    store = Store(out / "gpu_correct.csv", KEY, lambda: _rows.kernel_context(device.type))
    failed = {row["unit"] for row in store.current() if row["passed"] != "True"}
    return {unit.removeprefix("op ") for unit in failed if unit.startswith("op ")}


def units(smoke: bool) -> dict[str, list[tuple[str, str, str]]]:
    """Return each unit's name and the keys of its rows."""
    types = ("fp32",) if smoke else TYPES
    found = {}
    for op, bench in benches().items():
        labels = [f"{p} {c.mode} {c.label}" for c in cases_of(bench, smoke) for p in kernels_of(bench, c)]
        found[f"op {op}"] = [(f"op {op}", label, d) for d in types for label in labels]
    for name in CHECKED:
        once = ("logits", "NaN-filled", *(() if smoke else ("graph replay",)))
        parts = [form + part for form in FORMS for part in once]
        found[f"model {name}"] = [(f"model {name}", part, d) for d in types for part in parts]
    return found


def cases_of(bench: Bench, smoke: bool) -> tuple[Case, ...]:
    """Return the shapes to check: all but those whose fp64 copies would crowd out the processes beside."""
    return bench.checks[:1] if smoke else (*bench.checks, *(c for c in bench.cases if c.bytes <= LARGEST))


def kernels_of(bench: Bench, case: Case) -> tuple[str, ...]:
    """Return the providers of a case to compare: all but those of plain torch."""
    return tuple(p for p in bench.names(case) if p not in ("eager", "aten", "grouped_mm", "compile"))


def judge(key: tuple[str, str, str], ours: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor]) -> Row:
    """Compare outputs with the exact ones by the rule: twice plain torch's error, in norm and at the worst element.

    On top comes what rounding an exact result to the output's type costs: a quarter of its eps in norm, one eps of the
    largest value at an element; for bytes, one step; for fp32, whose sums depend on their order, eight eps.
    """
    errors = [0.0] * 4
    passed = len(ours) == len(exact)
    for a, t, r in zip(ours, plain, exact, strict=False):
        floor = torch.finfo(a.dtype).eps if a.dtype.is_floating_point else 1 / 255
        floor *= 8 if a.dtype == torch.float32 else 1
        passed = passed and a.shape == r.shape and a.dtype == t.dtype
        if not passed:
            break
        a, t, r = a.double(), t.double(), r.double()
        norm, top = r.norm().clamp_min(1e-30), r.abs().max().clamp_min(1e-30)
        found = [float(d.norm() / norm) for d in (a - r, t - r)]
        worst = [float(d.abs().max() / top) for d in (a - r, t - r)]
        passed = found[0] <= 2 * found[1] + floor / 4 and worst[0] <= 2 * worst[1] + floor
        errors = [max(e, n) if n == n else n for e, n in zip(errors, (*found, *worst), strict=True)]
    names = ("error", "torch_error", "max_error", "torch_max_error")
    shown = {name: f"{e:.2e}" for name, e in zip(names, errors, strict=True)}
    return {**dict(zip(KEY, key, strict=True)), **shown, "passed": passed, "note": ""}


def failure(key: tuple[str, str, str], note: str) -> Row:
    """Return the row of a unit that did not come to a comparison."""
    empty = dict.fromkeys(("error", "torch_error", "max_error", "torch_max_error"), "")
    return {**dict(zip(KEY, key, strict=True)), **empty, "passed": False, "note": " ".join(note.split())[:300]}


def filled_with_nan(call: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """Call with every new allocation filled with NaN: what nobody writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(False)


def check_op(unit: str, device: torch.device, smoke: bool) -> Iterator[Row]:
    """Check one operation at all its shapes, outputs and gradients."""
    bench = benches()[unit.removeprefix("op ")]
    reference = bench.reference or bench.providers["eager"]
    for dtype in ("fp32",) if smoke else TYPES:
        for case in cases_of(bench, smoke):
            case = replace(case, dtype=dtype)
            inputs = bench.make(case, device)
            exact = bench.bind(reference, in_fp64(inputs, DTYPES[dtype]), case)()
            plain = bench.bind(reference, inputs, case)()
            for provider in kernels_of(bench, case):
                label = f"{provider} {case.mode} {case.label}"
                try:
                    ours = filled_with_nan(bench.bind(bench.providers[provider], inputs, case))
                    yield judge((unit, label, dtype), ours, plain, exact)
                except Exception as error:
                    yield failure((unit, label, dtype), f"{type(error).__name__}: {error}")


def in_fp64(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Return operands with those of type ``dtype`` in fp64."""
    return {k: v.double() if v.dtype == dtype else v for k, v in inputs.items()}


def check_model(unit: str, device: torch.device, smoke: bool) -> Iterator[Row]:
    """Check one fused model in both forms: logits, unwritten memory, and graphs against the plain path."""
    from vtk.fused import fuse

    model = CHECKED[unit.removeprefix("model ")].build(device=device, smoke=smoke)
    size = 32 if smoke else 224
    torch.manual_seed(1)
    images = torch.randn(8, 3, size, size, device=device)
    with torch.no_grad():
        exact = as_tuple(copy.deepcopy(model).double()(images.double()))
        for dtype in ("fp32",) if smoke else TYPES:
            half = images.to(DTYPES[dtype])
            plain = as_tuple(copy.deepcopy(model).to(DTYPES[dtype])(half))
            for form, ln_folded in FORMS.items():
                fused = fuse(model, dtype=DTYPES[dtype], ln_folded=ln_folded, graphs=False)
                run = functools.partial(_logits, fused, device)
                yield judge((unit, f"{form}logits", dtype), run(half), plain, exact)
                again = filled_with_nan(functools.partial(run, half))
                yield judge((unit, f"{form}NaN-filled", dtype), again, plain, exact)
                if device.type == "cuda":
                    row = _replay(unit, dtype, fused, half, plain[0], exact[0])
                    yield row | {"case": f"{form}graph replay"}


def _logits(fused: Any, device: torch.device, images: Tensor) -> Sequence[Tensor]:
    """Return what a fused model gives; on a CPU its folded form exists only as the references of its operations."""
    from vtk.fused.stages import Plan

    if device.type == "cuda" or not fused.ln_folded:
        return as_tuple(fused(images))
    return as_tuple(fused.compute(images, Plan(kernels=True, ln_folded=True)))


def _replay(
    unit: str, dtype: str, fused: Callable[[Tensor], Tensor], images: Tensor, plain: Tensor, exact: Tensor
) -> Row:
    """Compare graphs with themselves and with the ungraphed path, at two sizes in turns and with two contents each.

    A replay must repeat itself bit for bit, whatever was replayed in between. Against the ungraphed path it must agree
    within two eps, or be as near to fp64 as `judge` demands: in a capture cuBLAS may take another algorithm.
    """
    parts: list[Callable[[Tensor], Tensor]] = [lambda x: x[:1], lambda x: x, lambda x: x[1:2], lambda x: x.flip(0)]
    batches, plains, exacts = ([part(x) for part in parts] for x in (images, plain, exact))
    wanted = [fused(x) for x in batches]
    fused.graphs = True  # type: ignore[attr-defined]
    found = [fused(x) for x in batches]
    again = [fused(x) for x in reversed(batches)][::-1]
    row = judge((unit, "graph replay", dtype), found, plains, exacts)
    repeats = all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    away = relative_error(found, wanted)
    near = away <= 2 * torch.finfo(images.dtype).eps or bool(row["passed"])
    notes = [] if repeats else ["replays of the same input differ"]
    if away != 0:
        notes.append(f"{away:.1e} from the plain path" + ("" if near else ", and too far from fp64"))
    return row | {"passed": repeats and near, "note": "; ".join(notes)}


def run_unit(unit: str, device: torch.device, smoke: bool) -> list[Row]:
    """Run a unit; what it raises becomes a failed row for each key that is still owed."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows: list[Row] = []
    note = "the unit ended without this row"
    try:
        check = check_op if unit.startswith("op ") else check_model
        rows.extend(check(unit, device, smoke))
    except Exception as error:
        traceback.print_exc()
        note = f"{type(error).__name__}: {error}"
    done = {tuple(row[k] for k in KEY) for row in rows}
    return [*rows, *(failure(key, note) for key in units(smoke)[unit] if key not in done)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = _stage.parser(__doc__, "tiny models and shapes, in this process, also on a CPU")
    parser.add_argument("--workers", type=int, default=8, help="processes side by side")
    parser.add_argument("--only", nargs="*", help="units, by a part of their names")
    parser.add_argument("--unit", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.unit and args.unit.startswith(TESTS):
        args.rows.write_text(json.dumps([run_tests(args.unit, failure)]), encoding="utf-8")
        return 0
    if args.unit:
        args.rows.write_text(json.dumps(run_unit(args.unit, device, args.smoke)), encoding="utf-8")
        return 0
    deadline = Deadline(args.seconds)
    name = "smoke_correct.csv" if args.smoke else "gpu_correct.csv"
    store = Store(args.out / name, KEY, lambda: _rows.kernel_context(device.type))
    wanted = units(args.smoke)
    if not args.smoke:
        wanted = {unit: [test_key(unit)] for unit in gpu_tests()} | wanted
    owed = {
        unit: keys for unit, keys in wanted.items()
        if not all(store.has(**dict(zip(KEY, k, strict=True))) for k in keys)
        and (args.only is None or any(part in unit for part in args.only))
    }  # fmt: skip
    if args.smoke:
        for unit in owed:
            if deadline.allows(1, unit):
                for row in run_unit(unit, device, True):
                    store.add(row)
    else:
        with tempfile.TemporaryDirectory() as folder:
            # tests that look at times have the card for themselves
            alone = {unit: keys for unit, keys in owed.items() if unit.startswith(ALONE)}
            beside = {unit: keys for unit, keys in owed.items() if unit not in alone}
            for place, those, workers in (("alone", alone, 1), ("beside", beside, args.workers)):
                (made := Path(folder) / place).mkdir()
                run_units(those, workers, deadline, made, store.add, failure)
    failed: list[str] = []
    if (args.out / "choices.json").exists() and (red := red_ops(args.out, device)):
        _choices.keep(failed, lambda: _choices.drop(args.out / "choices.json", red))
    rows = store.current()
    failed += [
        f"{r['unit']}, {r['case']}, {r['dtype']}: {r['note'] or r['error']}" for r in rows if r["passed"] != "True"
    ]
    print(f"correct: {len(rows)} rows, {len(failed)} failed", flush=True)
    return finish("correct", deadline, failed)


if __name__ == "__main__":
    sys.exit(main())
