"""Compiles every kernel of `vtk_kernels` without a GPU, as its launcher starts it, and says what the card would need.

    python tests/kernels/_offline.py            compare with offline_baseline.json
    python tests/kernels/_offline.py --write    renew offline_baseline.json
    python tests/kernels/_offline.py --labels "linear_gelu q" --capabilities 90

The launchers run on meta tensors while a recorder stands in for each kernel, so shapes, block sizes and types are the
real ones. Registers, stack and local memory come from the cuobjdump that Triton carries; a spill shows as STACK. What
fits on a multiprocessor follows from registers, shared memory and warps, and is held against `vtk_kernels._resident`.
Registers depend on the compiler: they are compared only under the Triton version that wrote the baseline.
"""

import argparse
import importlib
import json
import math
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before the first kernel is decorated

import torch
import triton
import triton.backends.nvidia
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import vtk_kernels
from vtk_kernels import _device

if __name__ == "__main__":  # the cases beside this file are a module of a package for pytest only
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.kernels._offline_cases import Case, cases
from tests.kernels._offline_occupancy import CARDS
from tests.kernels._offline_order import order_faults
from tests.kernels._offline_rules import TENSOR_CORES, absent, compare

BASELINE = Path(__file__).with_name("offline_baseline.json")

TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
    torch.int8: "*i8", torch.int32: "*i32", torch.uint8: "*u8",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One launch: a kernel, its arguments by name, its options, and the number of its programs."""

    label: str
    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]
    programs: int


_Noted = tuple[JITFunction, dict[str, Any], dict[str, Any], int]


class _Recorder:
    """Stands in for a kernel: ``recorder[grid](...)`` notes the call."""

    def __init__(self, kernel: JITFunction, calls: list[_Noted]) -> None:
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(isinstance(n, int) and n > 0 for n in grid), f"grid {grid}"

        def note(*args: Any, **named: Any) -> None:
            names = self.kernel.arg_names
            options = {"num_warps": 4, "num_stages": 3, "launch_pdl": False, "maxnreg": None}
            options = {name: named.pop(name, default) for name, default in options.items()}
            arguments = {**dict(zip(names, args, strict=False)), **named}
            assert set(arguments) == set(names), f"{self.kernel.__name__}: {set(arguments) ^ set(names)}"
            self.calls.append((self.kernel, arguments, options, math.prod(grid)))

        return note


def kernels() -> dict[str, JITFunction]:
    """Return every function of the package that Triton launches: those named ``…_kernel``."""
    return {k.__name__: k for _, k in _kernel_attributes().values()}


def _kernel_attributes() -> dict[tuple[str, str], tuple[Any, JITFunction]]:
    found = {}
    for info in pkgutil.iter_modules(vtk_kernels.__path__):
        module = importlib.import_module(f"vtk_kernels.{info.name}")
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and value.__name__.endswith("_kernel"):
                found[module.__name__, name] = (module, value)
    return found


def record(case: Case, capability: int) -> list[Call]:
    """Run a launcher as if on a card and return its launches; the second and later ones get a number after the label.

    Tensor maps and chained launches are for Hopper and later.
    """
    attributes = _kernel_attributes()
    calls: list[_Noted] = []
    modules = [
        importlib.import_module(f"vtk_kernels.{info.name}") for info in pkgutil.iter_modules(vtk_kernels.__path__)
    ]
    answers = {"is_hopper": lambda _: 90 <= capability < 120, "capability": lambda _: capability // 10}
    asking = [(module, name, getattr(_device, name)) for module in modules for name in answers if hasattr(module, name)]
    try:
        for module, name, _ in asking:
            setattr(module, name, answers[name])
        for (_, name), (module, kernel) in attributes.items():
            setattr(module, name, _Recorder(kernel, calls))
        case.launcher(*case.arguments)
    finally:
        for (_, name), (module, kernel) in attributes.items():
            setattr(module, name, kernel)
        for module, name, real in asking:
            setattr(module, name, real)
    return [Call(case.label if i == 0 else f"{case.label} #{i + 1}", *call) for i, call in enumerate(calls)]


def source(call: Call) -> ASTSource:
    """Specialise a call as Triton does at a launch: 1 is a constant, pointers and multiples of 16 are aligned."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, parameter in enumerate(call.kernel.params):
        value = call.arguments[parameter.name]
        free = not parameter.do_not_specialize
        constant = parameter.is_constexpr or value is None or (free and type(value) is int and value == 1)
        if constant:
            signature[parameter.name] = "constexpr"
            constants[i,] = value
        elif isinstance(value, Tensor):
            signature[parameter.name] = TYPES[value.dtype]
        elif isinstance(value, TensorDescriptor):
            block = ",".join(map(str, value.block_shape))
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype].removeprefix('*')}[{block}]>"
        else:
            assert type(value) in (int, float), f"{parameter.name}: {type(value)}; launchers pass plain numbers"
            wide = isinstance(value, int) and not -(2**31) <= value < 2**31
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i64" if wide else "i32"
        if not constant and free and (isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)):
            attributes[i,] = [["tt.divisibility", 16]]
    return ASTSource(fn=call.kernel, signature=signature, constexprs=constants, attrs=attributes)


def measure(call: Call, capability: int) -> dict[str, Any]:
    """Compile a call for a capability, such as 90, and return what it needs."""
    compiled = triton.compile(source(call), target=GPUTarget("cuda", capability, 32), options=call.options)
    folder = Path(triton.backends.nvidia.__file__).parent / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        done = subprocess.run([folder / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True)
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", done.stdout + done.stderr)
    if usage is None:
        raise RuntimeError(f"cuobjdump says nothing about {call.label}: {done.stdout[-300:]}{done.stderr[-300:]}")
    registers, stack, _, local = map(int, usage.groups())
    instruction = TENSOR_CORES.get(capability)
    rows = call.arguments.get("BLOCK_M", 0) or ("BLOCK_F" in call.arguments and call.arguments["BLOCK_T"])
    return {
        "kernel": call.kernel.__name__, "blocks": {k: v for k, v in call.arguments.items() if k.startswith("BLOCK")},
        "registers": registers, "stack": stack, "local": local, "shared": compiled.metadata.shared,
        "warps": call.options["num_warps"], "stages": call.options["num_stages"],
        "fetches": "prefetch.L2" in compiled.asm["ptx"],
        "order": list(order_faults(compiled.asm["ptx"], call.arguments, call.options["launch_pdl"])),
        "tensor_cores": None if rows < 64 or instruction is None else compiled.asm["ptx"].count(instruction),
    }  # fmt: skip


def key(call: Call) -> str:
    """Return what decides the machine code of a call."""
    made = source(call)
    return repr((call.kernel.__name__, made.signature, made.constants, made.attrs, call.options))


def run(capabilities: Sequence[int], chosen: Sequence[Case]) -> dict[str, Any]:
    """Compile cases and return rows by "label sm_NN", and the kernels that no case launches."""
    rows: dict[str, dict[str, Any]] = {}
    known: dict[tuple[str, int], dict[str, Any]] = {}
    launched = set()
    for capability in capabilities:
        for call in (call for case in chosen for call in record(case, capability)):
            launched.add(call.kernel.__name__)
            same = key(call), capability
            if same not in known:
                known[same] = measure(call, capability)
                print(f"{call.label:<36} sm_{capability} {known[same]}", file=sys.stderr, flush=True)
            rows[f"{call.label} sm_{capability}"] = {**known[same], "programs": call.programs}
    never = set(kernels()) - launched - absent(capabilities)
    return {"triton": triton.__version__, "rows": rows, "never launched": sorted(never)}


def baseline(found: dict[str, Any]) -> str:
    """Return the text of the baseline: a row a line."""
    rows = {label: {"kernel": row["kernel"], "registers": row["registers"]} for label, row in found["rows"].items()}
    lines = ",\n".join(f"  {json.dumps(label, ensure_ascii=False)}: {json.dumps(row)}" for label, row in rows.items())
    return f'{{\n "triton": {json.dumps(found["triton"])},\n "rows": {{\n{lines}\n }}\n}}\n'


def _label(row: str) -> str:
    """Return the label of a row's case, without the capability and the number of a later launch."""
    return re.sub(r"( #\d+)? sm_\d+$", "", row)


def _selected(case: Case, args: argparse.Namespace) -> bool:
    named = any(text in case.label for text in args.labels or ())
    return named or (args.essential and case.essential) or (args.measured and case.measured)


def main() -> int:
    """Compile, compare or write, and return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--essential", action="store_true", help="one shape of each kernel")
    parser.add_argument("--measured", action="store_true", help="the shapes of choices.json, in both half types")
    parser.add_argument("--labels", nargs="+", metavar="TEXT", help="cases whose labels contain one of these")
    parser.add_argument("--capabilities", type=int, nargs="+", default=[80, 90], choices=sorted(CARDS))
    parser.add_argument("--write", action="store_true", help=f"renew {BASELINE.name}, of a part its rows alone")
    parser.add_argument("--json", type=Path, help="write what was found to a file")
    args = parser.parse_args()
    part = args.essential or args.measured or args.labels
    before = json.loads(BASELINE.read_text())
    if args.write and part and before["triton"] != triton.__version__:
        parser.error(f"the baseline is of Triton {before['triton']}; renew the whole of it")
    chosen = [case for case in cases() if not part or _selected(case, args)]
    with tempfile.TemporaryDirectory() as cache:  # or Triton would hand out what it compiled before
        os.environ["TRITON_CACHE_DIR"] = cache
        found = run(args.capabilities, chosen)
    if args.json:
        args.json.write_text(json.dumps(found))
    if args.write:
        known = {label for label in before["rows"] if part and _label(label) in {case.label for case in cases()}}
        rows = {**{label: before["rows"][label] for label in before["rows"] if label in known}, **found["rows"]}
        before = {"triton": found["triton"], "rows": rows}
        BASELINE.write_text(baseline(before))
    if part and not args.essential:  # some kernels are not meant to be there
        found["never launched"] = []
        before["rows"] = {label: row for label, row in before["rows"].items() if label in found["rows"]}
    wrong = compare(found, before, whole=not part and args.capabilities == [80, 90])
    print("\n".join(wrong) or f"{len(found['rows'])} rows, nothing wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
