"""The command line as a person meets it: help, wrong words, YAML defaults, exit codes, --json."""

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

import vtk
from vtk.__main__ import main
from vtk.commands import COMMANDS, _cli
from vtk.errors import UsageError

REPO = Path(vtk.__file__).parents[1]


@dataclass(frozen=True)
class Config:
    data: Path = field(metadata={"help": "a folder"})
    img_size: int | tuple[int, int] | None = field(default=None, metadata={"help": "pixels"})
    lr: float = field(default=1e-4, metadata={"help": "rate"})
    sizes: tuple[int, ...] = field(default=(1, 2), metadata={"help": "list"})
    mean: tuple[float, ...] | None = field(default=None, metadata={"help": "list"})
    mode: Literal["a", "b+c"] = field(default="a", metadata={"help": "choice"})
    flag: bool = field(default=True, metadata={"help": "switch"})


def parse(*argv: str) -> Config:
    return _cli.parse(Config, argv, prog="vtk x", description="d", positional=("data",))


def test_help_is_quick_and_needs_no_torch() -> None:
    code = "import sys; from vtk.__main__ import main; main(['--help']); assert 'torch' not in sys.modules"
    seconds = []
    for _ in range(3):  # of processor time, the least: another process's work is none of the command's
        before = os.times()
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO).stdout
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        seconds.append(used)
        if used < 1:
            break
    assert min(seconds) < 1
    assert all(name in out for name in COMMANDS)
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("command", [*COMMANDS, "tasks list", "tasks diff", "tasks merge", "export onnx"])
def test_every_command_explains_itself_without_torch(command: str) -> None:
    code = (
        "import sys\nfrom vtk.__main__ import main\ntry: main(sys.argv[1:])\n"
        "except SystemExit as e: assert not e.code\nassert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code, *command.split(), "--help"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert command in run.stdout


def test_cli_py_runs_from_a_checkout_that_was_never_installed(tmp_path: Path) -> None:
    # with -S the .pth file of an editable install is not read, and PYTHONPATH alone brings the dependencies
    file = str(REPO / "cli.py")
    code = f"import runpy, sys; sys.argv[1:] = ['--version']; runpy.run_path({file!r}, run_name='__main__')"
    site = sysconfig.get_path("purelib")
    run = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": site},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("vtk ")


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["finetun"], 2, "did you mean `vtk finetune`?"),
        (["analyze"], 2, "no model; give a pack, a checkpoint or a timm model name"),
        (["tasks", "push"], 2, "Missing from vtk tasks push"),
        (["tasks", "dance"], 2, "unknown; choose one of: list, diff, merge"),
        (["export", "triton"], 2, "Missing from vtk export triton"),
        (["export", "coreml"], 2, "unknown export target `coreml`; choose one of: onnx"),
        (["finetune", "d", "--batch-size", "auto2"], 2, "--batch-size: 'auto2' is not INT|{auto}; --batch-size"),
        (["tasks", "list", "/nowhere"], 3, "no such folder"),
        (["tasks", "diff", "/nowhere"], 3, "there is no folder /nowhere; give the folder of a pack"),
    ],
)
def test_mistakes_are_one_line_and_an_exit_code(
    argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(argv) == code
    err = capsys.readouterr().err
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_json_mode_gives_one_object_also_for_an_error(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert main(["tasks", "list", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"packs": []}
    assert main(["tasks", "list", "/nowhere", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["exit_code"] == 3


def test_flags_of_every_kind() -> None:
    config = parse(
        "d", "--img-size", "48", "64", "--sizes", "1,2, 4", "8", "--mean", ".5,.5", "--mode", "b+c", "--no-flag"
    )
    assert config == Config(Path("d"), (48, 64), 1e-4, (1, 2, 4, 8), (0.5, 0.5), "b+c", False)
    assert parse("d", "--img-size", "48").img_size == 48


@pytest.mark.parametrize("text", ["48,64", "48x64", "48 64"])
def test_a_size_may_be_written_as_people_write_it(text: str) -> None:
    assert parse("d", "--img-size", *text.split()).img_size == (48, 64)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["d", "--img-size", "1", "2", "3"], "'1 2 3' is no size; give one side, or height and width"),
        (["d", "--img-size", "big"], "'big' is no size"),
        (["d", "--img-size"], "'nothing' is no size"),
        (["d", "--lr", "fast"], "--lr: 'fast' is not a number"),
        (["d", "--sizes", "1.5"], "--sizes: '1.5' is not a whole number"),
        (["d", "--mode", "z"], "invalid choice 'z' for argument '--mode'. Expected one of ('a', 'b+c')"),
        (["d", "--modee", "a"], "Unrecognized options: --modee"),
        (["d", "e"], "Unrecognized options: e"),
        ([], "Missing from vtk x: DATA"),
    ],
)
def test_wrong_flags_are_one_line_too(argv: list[str], message: str, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(UsageError) as caught:
        parse(*argv)
    assert message in " ".join(str(caught.value).split())
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("see `vtk x --help`")
    assert capfd.readouterr() == ("", "")  # what tyro draws is kept away


@pytest.mark.parametrize("argv", [("",), ("d", "--mode", "")])
def test_an_empty_argument_is_no_folder(argv: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="an argument is empty"):
        parse(*argv)


def test_a_wrong_flag_gives_its_json_object(capsys: pytest.CaptureFixture) -> None:
    assert main(["tasks", "merge", "--json", "--nonsense"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


def test_yaml_gives_defaults_and_flags_win(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "data: here\nlr: 1e-3\nimg-size: [32, 48]\nsizes: [4]\nmean: [0.1, 0.2]\nflag: false\n"
    )
    config = parse("--config", str(tmp_path / "c.yaml"), "--sizes", "16")
    # data stays positional: it may come from the file alone
    assert config == Config(Path("here"), (32, 48), 1e-3, (16,), (0.1, 0.2), "a", False)
    assert parse("there", f"--config={tmp_path / 'c.yaml'}").data == Path("there")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed: 3", "unknown key `speed`; known: data"),
        ("lr: fast", "`lr`"),
        ("mode: c", "'c' is not one of a, b\\+c"),
        ("sizes: [1.5]", "whole number"),
        ("flag: 3", "expected bool"),
        ("- a", "must hold"),
        ("a: [", "not valid YAML"),
    ],
)
def test_wrong_yaml_is_a_usage_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        parse("d", "--config", str(tmp_path / "c.yaml"))


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (float, "1e-3", 1e-3),
        (int, "8", 8),
        (tuple[float, ...], 3, (3.0,)),
        (int | None, None, None),
        (Path, "a", Path("a")),
        (int, 2**60 + 1, 2**60 + 1),  # no float holds it
    ],
)
def test_yaml_values(hint: Any, value: Any, expected: Any) -> None:
    assert _cli.from_yaml(hint, value) == expected


@pytest.mark.parametrize(
    ("hint", "value", "message"),
    [
        (int, float("inf"), "expected a whole number, found inf"),
        (int, "1e999", "expected a whole number, found '1e999'"),
        (int, 2.5, "expected a whole number, found 2.5"),
        (int, "many", "expected a number, found 'many'"),
        (float, 10**400, "expected a number, found 1000"),
    ],
)
def test_yaml_values_that_do_not_fit(hint: Any, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        _cli.from_yaml(hint, value)


@pytest.mark.parametrize("command", [["eval", "a", "b"], ["predict", "a", "b"], ["profile", "a"]], ids=str)
@pytest.mark.parametrize("threads", ["0", "99999"])
def test_numbers_of_threads_that_would_kill_the_process_are_refused(
    command: list[str], threads: str, capsys: pytest.CaptureFixture
) -> None:
    assert main([*command, "--threads", threads]) == 2
    assert f"`--threads` is {threads}; give 1 to" in capsys.readouterr().err


def test_a_fault_of_the_toolkit_and_ctrl_c_give_their_json_object_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr("vtk.commands.tasks.main", fail)
    error: BaseException = ZeroDivisionError("x")
    with pytest.raises(ZeroDivisionError):
        main(["tasks", "--json"])
    assert json.loads(capsys.readouterr().out) == {"error": "ZeroDivisionError: x", "exit_code": 1}
    error = KeyboardInterrupt()
    assert main(["tasks", "--json"]) == 130
    assert json.loads(capsys.readouterr().out) == {"error": "stopped", "exit_code": 130}


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["tasks", "list", "."]], ids=str)
def test_a_reader_that_goes_away_is_no_error(argv: list[str], tmp_path: Path) -> None:
    # it waits on its input until the reader is gone
    code = "import sys; sys.stdin.read(); from vtk.__main__ import entry; entry()"
    run = subprocess.Popen(
        [sys.executable, "-c", code, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=tmp_path,
    )  # fmt: skip
    assert run.stdin is not None and run.stdout is not None and run.stderr is not None
    run.stdout.close()
    run.stdin.close()
    assert (run.wait(), run.stderr.read()) == (0, "")
    run.stderr.close()


def test_an_output_without_the_letters_shows_numbers(tmp_path: Path) -> None:
    (tmp_path / "ü").mkdir()
    run = subprocess.run(
        [sys.executable, "-m", "vtk", "tasks", "list", str(tmp_path / "ü")], capture_output=True, text=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    assert "\\xfc; `vtk finetune` makes them" in run.stdout
