"""Every kernel compiled by an older Triton at the measured shapes: no spills, and as many programs as counted on fit.

What fits on a multiprocessor depends on the compiler: Triton 3.6 takes a third more registers than 3.8 for some.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.peers

SCRIPT = Path(__file__).parents[1] / "kernels" / "_offline.py"


@pytest.fixture(scope="module")
def folder() -> str:
    """The folder of an older Triton, which today's torch is to import."""
    found = os.environ.get("VTK_OLD_TRITON")
    if found is None:
        pytest.fail("VTK_OLD_TRITON names no folder with an older Triton; run `make test-peers`")
    return found


@pytest.mark.parametrize(
    ("capability", "flags"), [("90", ("--essential", "--measured")), ("80", ("--essential",))], ids=["sm_90", "sm_80"]
)
def test_kernels_compile_for_as_many_programs_as_their_launchers_count_on(
    capability: str, flags: tuple[str, ...], folder: str, tmp_path: Path
) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(SCRIPT), "--json", str(tmp_path / "found.json"), *flags]
    done = subprocess.run([*command, "--capabilities", capability], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    (installed,) = importlib.metadata.distributions(name="triton", path=[folder])
    assert found["triton"] == installed.version != importlib.metadata.version("triton")
    kernels = {row["kernel"] for row in found["rows"].values()}
    assert {"_linear_kernel", "_splitk_linear_kernel", "_packed_attention_kernel", "_add_norm_kernel"} <= kernels
    measured = [label for label in found["rows"] if "×" in label and "float16" in label]
    assert bool(measured) == ("--measured" in flags)
