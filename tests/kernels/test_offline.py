import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels._offline_rules import absent

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
        known = {row["kernel"] for row in BASELINE["rows"].values()}
        assert compiled == known - absent([int(capability.removeprefix("sm_"))])


def test_products_on_hopper_use_its_matrix_units(essential: tuple[int, str, dict[str, Any]]) -> None:
    counts = {row["kernel"]: row["tensor_cores"] for label, row in essential[2]["rows"].items() if "sm_90" in label}
    attentions = ("packed_attention", "short_attention")
    for kernel in ("linear", "linear_gelu_backward", "grouped_linear", *attentions, "splitk_linear"):
        assert counts[f"_{kernel}_kernel"] > 0, kernel


def test_a_chain_fetches_before_it_waits_and_counts_safely(essential: tuple[int, str, dict[str, Any]]) -> None:
    rows = {label.removesuffix(" sm_90"): row for label, row in essential[2]["rows"].items()}
    assert not [row["order"] for row in rows.values() if row["order"]]
    fetching = {label.rsplit(" ×")[0] for label, row in rows.items() if row["fetches"]}
    assert fetching >= {
        "add_norm partials S", "linear stats b8", "linear_gelu b1", "linear_gelu stats b8", "linear_residual fc2 b1",
        "linear_residual fc2 b8", "slices fc2 b1", "splitk_linear",
    }  # fmt: skip
    assert not rows["add_norm S"]["fetches"] and not rows["packed_attention 197 12h S"]["fetches"]


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


@pytest.mark.slow
def test_every_kernel_fits_cards_with_99_KiB_for_a_program(tmp_path: Path) -> None:
    check(compile_offline(tmp_path / "found.json", "--essential", "--capabilities", "89", "120"), ("sm_89", "sm_120"))
