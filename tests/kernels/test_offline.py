import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels._offline_rules import compare

pytest.importorskip("triton.backends.nvidia")

SCRIPT = Path(__file__).with_name("_offline.py")
BASELINE = json.loads(SCRIPT.with_name("offline_baseline.json").read_text())


def compile_offline(out: Path, *flags: str) -> tuple[int, str, dict[str, Any]]:
    """Run the compiler in a process of its own: this one may have the interpreter in place of it."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--json", str(out), *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    return done.returncode, done.stdout + done.stderr[-3000:], json.loads(out.read_text()) if out.exists() else {}


@pytest.fixture(scope="module")
def essential(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, dict[str, Any]]:
    # for Hopper, whose forms are the harder ones; all shapes for Ampere, Hopper and Blackwell are slow
    flags = ("--essential", "--capabilities", "90")
    return compile_offline(tmp_path_factory.mktemp("offline") / "found.json", *flags)


def test_every_kernel_compiles_for_hopper_without_a_fault(essential: tuple[int, str, dict[str, Any]]) -> None:
    check(essential, ("sm_90",))


def check(done: tuple[int, str, dict[str, Any]], capabilities: tuple[str, ...]) -> None:
    """Look for a fault, and for a kernel that is not there."""
    code, said, found = done
    assert code == 0, said
    assert not found["never launched"]
    for capability in capabilities:
        compiled = {row["kernel"] for label, row in found["rows"].items() if label.endswith(capability)}
        assert compiled == {row["kernel"] for row in BASELINE["rows"].values()}


def test_products_on_hopper_use_its_matrix_units(essential: tuple[int, str, dict[str, Any]]) -> None:
    counts = {row["kernel"]: row["tensor_cores"] for label, row in essential[2]["rows"].items() if "sm_90" in label}
    attentions = ("packed_attention", "short_attention")
    for kernel in ("linear", "linear_gelu_backward", "grouped_linear", *attentions, "splitk_linear"):
        assert counts[f"_{kernel}_kernel"] > 0, kernel


@pytest.mark.parametrize(
    "change,said",
    [
        ({"stack": 8}, "spills: STACK 8"),
        ({"local": 4}, "LOCAL 4 bytes"),
        ({"shared": 164 * 1024}, "shared memory 167936 bytes, the card has 166912"),
        ({"registers": 112}, "registers 100 → 112"),
        ({"tensor_cores": 0}, "no wgmma.mma_async in a product"),
        ({"registers": 110}, None),
        ({"kernel": "another"}, "kernel: in the baseline, but no longer compiled"),
    ],
)
def test_faults_are_found(change: dict[str, Any], said: str | None) -> None:
    row = {"kernel": "kernel", "registers": 100, "stack": 0, "local": 0, "shared": 0, "blocks": {}, "tensor_cores": 4}
    label = "x sm_80" if "shared" in change else "x sm_90"
    found = {"triton": "9", "never launched": [], "rows": {label: {**row, **change}}}
    baseline = {"triton": "9", "rows": {label: {"kernel": "kernel", "registers": 100}}}
    lines = compare(found, baseline, whole=True)
    assert lines == [] if said is None else len(lines) == 1 and said in lines[0]
    older = compare(found, {**baseline, "triton": "8"}, whole=True)
    assert older == ([] if "registers" in change else lines)  # another compiler may need other registers, never a spill


def test_what_is_missing_is_found() -> None:
    row = {"kernel": "kernel", "registers": 1, "stack": 0, "local": 0, "shared": 0, "blocks": {}, "tensor_cores": None}
    found = {"triton": "9", "never launched": ["forgotten"], "rows": {"x sm_80": row, "new sm_80": row}}
    baseline = {"triton": "9", "rows": {"x sm_80": row, "gone sm_80": row}}
    assert compare(found, baseline, whole=True) == [
        "no case launches forgotten",
        "new sm_80: not in the baseline; run _offline.py --write",
        "gone sm_80: in the baseline, but no longer compiled",
    ]
    assert compare({**found, "rows": {"x sm_80": row}}, baseline, whole=False) == ["no case launches forgotten"]
    other = {"triton": "9", "never launched": [], "rows": {"x sm_100": row}}  # a capability without a baseline
    assert compare(other, baseline, whole=False) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "capabilities"),
    [((), ("sm_80", "sm_90")), (("--capabilities", "100"), ("sm_100",))],
    ids=["sm_80 and sm_90", "sm_100"],
)
def test_the_whole_table_compiles_without_a_fault(
    flags: tuple[str, ...], capabilities: tuple[str, ...], tmp_path: Path
) -> None:
    done = compile_offline(tmp_path / "found.json", *flags)
    check(done, capabilities)
    assert len(done[2]["rows"]) >= 200
