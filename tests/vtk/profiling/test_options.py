"""Options that contradict one another, or that no generator and no machine takes, are one line and exit code 2."""

from typing import Any

import pytest

from vtk.__main__ import main
from vtk.errors import UsageError
from vtk.profiling.config import ProfileCommand


@pytest.mark.parametrize(("options", "said"), [
    ({"seed": -1}, "`--seed` is -1; allowed is from 0 to 4294967295"), ({"seed": 1 << 32}, "`--seed` is 4294967296"),
    ({"tasks": ("a",)}, "add it to --backends"), ({"tasks": ("a",), "backends": ("eager",)}, "add it to --backends"),
    ({"compare": ("a",)}, "give two profile.json"), ({"compare": ("a", "b"), "source": "c"}, "and no source"),
    ({"source": "", "fail_above": 3.0}, "together with --compare"),
    ({"source": "", "compare": ("a", "b"), "out": "x"}, "`--compare` measures no model, so --out would do nothing"),
    ({"source": "", "compare": ("a", "b"), "ceilings": True}, "--ceilings would do nothing"),
    ({"source": "", "ceilings": True, "out": "x", "budget_ms": 3.0}, "so --out and --budget-ms would do nothing"),
    ({"source": "", "img_sizes": (32,)}, "`source` is empty"),
    ({"img_size": 32, "img_sizes": (32,)}, "exclude each other"),
])  # fmt: skip
def test_contradictions_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        ProfileCommand(**{"source": "test_vit", **options})
    assert said in str(caught.value)


def test_what_goes_together_is_taken() -> None:
    ProfileCommand(source="", ceilings=True, device="cpu", threads=2)
    ProfileCommand(source="", compare=("a", "b"), fail_above=5.0)
    ProfileCommand(source="pack", backends=("bank+graph",), tasks=("a",), h2d="in", order="sequential", ceilings=True)
    ProfileCommand(source="test_vit", img_sizes=(32, 64), budget_ms=3.0, reference="other")


@pytest.mark.parametrize(("argv", "code", "said"), [
    (["test_vit", "--seed", "99999999999999999999999"], 2, "allowed is from 0 to 4294967295"),
    (["test_vit", "--batch-sizes", "many"], 2, "is many; allowed is a list of whole numbers"),
    (["nowhere/model.engine"], 3, "does not exist"),
    (["nowhere.plan", "--backends", "tensorrt"], 3, "does not exist"),
    (["--server", "h:1", "--seed", "-1"], 2, "--seed"),
])  # fmt: skip
def test_one_line_each(argv: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *argv]) == code
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
