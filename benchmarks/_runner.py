"""The one runner of kernel benchmarks: a file ``bench_OP.py`` holds shapes, inputs and providers, this one the rest.

Every provider gets the same random inputs; its outputs are compared with the first provider's before it is timed: on
CUDA inside a graph, over operands that rotate so that weights come from memory, without the host's launch costs (see
`_timing`). "Percent" is the floor over the time measured: expected bytes and FLOPs over the ceilings of the same run,
the larger of the two, and never a data sheet's; operands that fit into the L2 cache all at once may be above 100.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import _rows
import _sources
import torch
from _timing import Times, recover, time_call, time_in_graph
from torch import Tensor

Outputs = Tensor | tuple[Tensor, ...]
Inputs = dict[str, Tensor]

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KEY = ("op", "mode", "provider", "shape", "dtype")
AGREE = {"fp64": 1e-10, "fp32": 1e-4, "fp16": 1e-2, "bf16": 4e-2}
"""Largest ‖a − b‖ / ‖b‖ between two providers that are still the same operation."""


@dataclass(frozen=True)
class Ceilings:
    """What the device reached in this run: bytes per second of a copy (read and written), FLOP per second of a GEMM."""

    bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
        shape: name to size, in the order to print.
        bytes: the fewest that must move: each input read once, each output written once, at ``dtype``.
        flops: of the matrix products, two per multiply-add.
        mode: "forward", or "backward" for the gradients alone.
        dtype: key of `DTYPES`.
        compiled: whether torch.compile is measured too; it takes seconds to compile.
    """

    shape: Mapping[str, int]
    bytes: int
    flops: int = 0
    mode: str = "forward"
    dtype: str = "bf16"
    compiled: bool = False

    @property
    def label(self) -> str:
        """The shape as in "B=8 N=197 C=384"; options that are 0 are left out."""
        return " ".join(f"{k}={v}" for k, v in self.shape.items() if v)


class Maker:
    """Makes random inputs on a device and in a type."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Return normally distributed numbers."""
        return torch.randn(shape, device=self.device).mul_(scale).to(dtype or self.dtype)

    def offsets(self, lengths: Sequence[int]) -> Tensor:
        """Return cumulative lengths (segments + 1), int32, first 0."""
        return torch.tensor([0, *lengths], device=self.device).cumsum(0).to(torch.int32)


@dataclass(frozen=True)
class Bench:
    """One operation.

    Attributes:
        op: name, as in ``torch.ops.vtk_kernels``.
        tests: paths that must be green before a number is written.
        cases: shapes of the models.
        checks: further, odd shapes for the stage ``correct``; the first of them is the smoke test's.
        inputs: makes the operands of a case.
        providers: name to ``f(inputs, case)``; the first is "eager", what plain torch code would do, and the one that
            torch.compile gets.
        gradients: operands whose gradients the mode "backward" computes.
        differentiable: how many of the outputs, from the first, gradients flow from.
        choice: for a choice table, ``(rows, n, k)`` of a case, None where it decides nothing.
        answers: provider to what `vtk_kernels.choices.choose` says for it.
        takes: provider to which cases it can run, all where it is not named.
        reference: further outputs than "eager" gives, for comparisons; by default "eager" itself.
        uncapturable: providers that read values on the host, which no CUDA graph can hold; they decide no choice.
    """

    op: str
    tests: tuple[str, ...]
    cases: tuple[Case, ...]
    checks: tuple[Case, ...]
    inputs: Callable[[Case, Maker], Inputs]
    providers: Mapping[str, Callable[[Inputs, Case], Outputs]]
    gradients: tuple[str, ...] = ()
    differentiable: int = 1
    choice: Callable[[Case], tuple[int, int, int] | None] = lambda case: None
    answers: Mapping[str, str] = field(default_factory=dict)
    takes: Mapping[str, Callable[[Case], bool]] = field(default_factory=dict)
    reference: Callable[[Inputs, Case], Outputs] | None = None
    uncapturable: tuple[str, ...] = ()

    def names(self, case: Case) -> tuple[str, ...]:
        """Return the providers of a case, torch.compile last."""
        able = (name for name in self.providers if name not in self.takes or self.takes[name](case))
        return (*able, *(("compile",) if case.compiled else ()))

    def deciding(self, case: Case) -> tuple[str, ...]:
        """Return the providers of a case between which a measurement chooses."""
        return tuple(name for name in self.names(case) if name in self.answers)

    def make(self, case: Case, device: torch.device) -> Inputs:
        """Return a case's operands, the same numbers at every call."""
        torch.manual_seed(0)
        return self.inputs(case, Maker(device, DTYPES[case.dtype]))

    def function(self, case: Case, provider: str) -> Callable[[Inputs, Case], Outputs]:
        """Return what a provider runs; torch.compile starts anew."""
        if provider != "compile":
            return self.providers[provider]
        torch._dynamo.reset()
        return torch.compile(self.providers["eager"], dynamic=False)

    def bind(
        self, function: Callable[[Inputs, Case], Outputs], inputs: Inputs, case: Case
    ) -> Callable[[], tuple[Tensor, ...]]:
        """Return a call of ``function``, or of its gradients with random output gradients."""
        if case.mode == "forward":

            def forward() -> tuple[Tensor, ...]:
                with torch.no_grad():
                    return as_tuple(function(inputs, case))

            return forward
        leaves = [inputs[name].detach().requires_grad_() for name in self.gradients]
        # compiled backwards would otherwise give their saved tensors away, and the graph is used again
        with torch._functorch.config.patch(donated_buffer=False):
            outputs = as_tuple(function({**inputs, **dict(zip(self.gradients, leaves, strict=True))}, case))
        outputs = outputs[: self.differentiable]
        torch.manual_seed(1)
        given = [torch.randn(o.shape, device=o.device).to(o.dtype) for o in outputs]
        return lambda: torch.autograd.grad(outputs, leaves, given, retain_graph=True)


def as_tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    """Return outputs as a tuple."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def relative_error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the largest ‖a − b‖ / ‖b‖ over the outputs both have; NaN stays NaN."""
    worst = 0.0
    for a, b in zip(found, wanted, strict=False):
        a, b = a.detach().double(), b.detach().double()
        error = float((a - b).norm() / b.norm().clamp_min(1e-30))
        worst = error if error != error else max(worst, error)
    return worst


def timed(
    bench: Bench, case: Case, provider: str, function: Callable[[Inputs, Case], Outputs], inputs: Inputs,
    device: torch.device, quick: bool,
) -> tuple[str, Times]:  # fmt: skip
    """Return how a provider was timed ("graph", "launch", "clock"), and its times."""
    if device.type == "cuda" and provider not in bench.uncapturable:
        try:
            return "graph", time_in_graph(lambda operands: bench.bind(function, operands, case), inputs, device)
        except Exception as error:  # the other rows are still worth their time
            print(f"{bench.op} {provider} {case.label}: not captured, {type(error).__name__}: "
                  f"{' '.join(str(error).split())[:200]}", flush=True)  # fmt: skip
        recover()
    way = "launch" if device.type == "cuda" else "clock"
    return way, time_call(bench.bind(function, inputs, case), device, quick=quick)


def measure(
    bench: Bench, case: Case, provider: str, device: torch.device, ceilings: Ceilings | None, *, quick: bool = False
) -> dict[str, object]:
    """Compare a provider with "eager", time it, and return its row; an output that differs is not timed."""
    row: dict[str, object] = {
        "op": bench.op, "mode": case.mode, "provider": provider, "shape": case.label, "dtype": case.dtype,
    }  # fmt: skip
    function, inputs = bench.function(case, provider), bench.make(case, device)
    call = bench.bind(function, inputs, case)
    error = relative_error(call(), bench.bind(bench.providers["eager"], bench.make(case, device), case)())
    passed = error <= AGREE[case.dtype]
    timer, times, peak = None, (0.0, 0.0, 0.0), None
    if passed:
        if device.type == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            call()
            peak = (torch.cuda.max_memory_allocated() - before) / 1e6
        del call  # what a backward keeps of its forward
        timer, times = timed(bench, case, provider, function, inputs, device, quick)
    seconds = 1e-6 * times[0]
    floor = max(case.bytes / ceilings.bytes_per_s, case.flops / ceilings.flop_per_s) if ceilings else None
    row |= {f"{name}_us": round(t, 2) if passed else None for name, t in zip(("p50", "p20", "p80"), times, strict=True)}
    row |= {
        "timer": timer, "expected_mb": round(case.bytes / 1e6, 3), "expected_gflop": round(case.flops / 1e9, 3),
        "gb_s": round(case.bytes / seconds / 1e9, 1) if passed else None,
        "tflop_s": round(case.flops / seconds / 1e12, 2) if passed and case.flops else None,
        "percent": round(100 * floor / seconds, 1) if passed and floor else None,
        "peak_mb": None if peak is None else round(peak, 2), "error": f"{error:.2e}", "passed": passed,
    }  # fmt: skip
    return row


def show(row: Mapping[str, object]) -> None:
    """Print one row."""
    what = f"{row['op']} {row['mode']} {row['provider']}"
    time_ = "differs from eager, not timed" if row["p50_us"] is None else f"{row['p50_us']:>10} µs"
    rate = "" if row["percent"] is None else f" {row['percent']:>5} % of the floor"
    print(f"{what:<42} {row['shape']:<40} {row['dtype']} {time_}{rate}", flush=True)


def main(bench: Bench, argv: Sequence[str] | None = None) -> int:
    """Run one operation's benchmark from the command line."""
    parser = argparse.ArgumentParser(description=f"Times `{bench.op}` against plain torch and torch.compile on CUDA.")
    parser.add_argument("--smoke", action="store_true", help="one tiny shape, also on a CPU; writes nothing")
    parser.add_argument("--results", type=Path, default=_rows.RESULTS / "gpu_kernels.csv")
    args = parser.parse_args(argv)
    if args.smoke:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        case = dataclasses.replace(bench.checks[0], dtype="bf16" if device.type == "cuda" else "fp32")
        rows = [measure(bench, case, name, device, None, quick=True) for name in bench.names(case) if name != "compile"]
        for row in rows:
            show(row)
        return 0 if all(row["passed"] for row in rows) else 1
    if not torch.cuda.is_available():
        sys.exit("this benchmark times kernels on a CUDA device and none is here; --smoke tries it on the CPU")
    _rows.require_green(bench.tests)
    import _ceilings

    device = torch.device("cuda")
    ceilings = _ceilings.measure(device).ceilings
    failed = False
    for case in bench.cases:
        for provider in bench.names(case):
            row = measure(bench, case, provider, device, ceilings)
            show(row)
            failed |= not row["passed"]
            _rows.append(args.results, {**row, **_rows.kernel_context("cuda"), "code": _sources.current(bench.op)})
    return int(failed)
