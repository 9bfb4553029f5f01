"""The command line as a person meets it: help, wrong words, YAML defaults, exit codes, --json."""

import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

import vtk
from vtk.__main__ import main
from vtk.commands import COMMANDS, _cli
from vtk.errors import UsageError
from vtk.options import Config, Option

REPO = Path(vtk.__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Example(Config):
    data: Annotated[Path, Option("a folder")]
    img_size: Annotated[int | tuple[int, int] | None, Option("size")] = None
    lr: Annotated[float, Option("rate")] = 1e-4
    sizes: Annotated[tuple[int, ...], Option("list")] = (1, 2)
    mean: Annotated[tuple[float, ...] | None, Option("list")] = None
    mode: Annotated[Literal["a", "b+c"], Option("choice")] = "a"
    flag: Annotated[bool, Option("on; --no-flag: off")] = True
    maybe: Annotated[bool | None, Option("yes, no or left open")] = None
    short: Annotated[bool, Option("short", only_yes=True)] = False
    text: Annotated[tuple[str, ...], Option("words")] = ()
    pairs: Annotated[tuple[str, ...], Option("words", pattern="[^=]+=.*")] = ()
    each: Annotated[tuple[str, ...], Option("given once each", flag="one", metavar="X")] = ()


def parse(*argv: str) -> Example:
    return _cli.parse(Example, argv, prog="vtk x", description="d", positional=("data",))


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


def test_every_command_explains_itself_without_torch() -> None:
    # one process for all: starting one for each takes longer than all of their helps
    code = """
import contextlib, io, sys
from vtk.__main__ import main
for command in sys.argv[1:]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main([*command.split(), "--help"])
        except SystemExit as stop:
            assert not stop.code, command
    assert command in out.getvalue(), command
    assert "torch" not in sys.modules, command
"""
    commands = [*COMMANDS, "tasks list", "tasks diff", "tasks merge", "export onnx", "export triton", "data audit"]
    run = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


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
        (["analyze"], 2, "no model was given; give a pack, a checkpoint or a timm model name"),
        (["tasks", "push"], 2, "`PACK` is missing; give a pack, a bundle"),
        (["eval"], 2, "`SOURCE` is missing; give a task pack"),
        (["tasks", "convert", "a", "--out", "b"], 2, "`--pack-dtype` is missing; give fp32, bf16 or int8; see"),
        (["analyze", "--compare", "a"], 2, "allowed is two models, or two folders that this command wrote"),
        (["tasks", "dance"], 2, "unknown; choose one of: list, diff, merge"),
        (["export", "triton"], 2, "`--out` is missing; give"),
        (["export", "coreml"], 2, "unknown export target `coreml`; choose one of: onnx"),
        (
            ["finetune", "d", "--batch-size", "auto2"],
            2,
            "is auto2; allowed is a whole number or auto (numbers at",
        ),
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
        "d", "--img-size", "48", "64", "--sizes", "1,2, 4", "8", "--mean", ".5,.5", "--mode", "b+c", "--no-flag",
        "--maybe", "no", "--short", "--text", "a,b=[1,2]", "c", "--one", "x,1", "--one=y",
    )  # fmt: skip
    assert config == Example(
        data=Path("d"), img_size=(48, 64), sizes=(1, 2, 4, 8), mean=(0.5, 0.5), mode="b+c", flag=False, maybe=False,
        short=True, text=("a", "b=[1,2]", "c"), each=("x,1", "y"),
    )  # fmt: skip
    assert parse("d", "--img-size", "48").img_size == 48
    assert parse("--maybe", "d").maybe is True and parse("--no-maybe", "d").maybe is False
    assert parse("--maybe", "d").data == parse("--flag", "d").data == parse("--short", "d").data == Path("d")
    assert parse("--flag=no", "d").flag is False and parse("--flag=yes", "d").flag is True
    assert parse("--lr", "-1e-3", "d").lr == -1e-3  # a value may begin with a dash
    assert parse("--lr=-2", "--img_size", "9", "--sizes", "3", "--flag", "d").img_size == 9
    assert parse("d", "--mean", "None").mean is None
    assert parse("--one", "x", "d", "--one", "y").each == ("x", "y")


def test_two_dashes_end_the_flags() -> None:
    assert parse("--lr", "2", "--", "-d") == parse("--lr=2", "--", "-d") == Example(data=Path("-d"), lr=2)
    assert parse("--sizes", "3", "--", "--flag").data == Path("--flag")
    assert parse("--sizes", "3", "4", "--", "5") == Example(data=Path("5"), sizes=(3, 4))
    assert parse("--", "--help").data == Path("--help")
    with pytest.raises(UsageError, match="`--lr` is nothing"):
        parse("--lr", "--", "d")
    with pytest.raises(UsageError, match="unexpected argument `-e`"):
        parse("--", "d", "-e")


def test_a_list_after_an_equals_sign_goes_on_with_the_words_that_fit() -> None:
    assert parse("--sizes=3", "4", "d") == Example(data=Path("d"), sizes=(3, 4))
    assert parse("--img-size=48", "64", "d") == Example(data=Path("d"), img_size=(48, 64))
    assert parse("--img-size=48", "d").img_size == 48
    assert parse("d", "--mean=-1e-3", "-2e-3").mean == (-1e-3, -2e-3)
    assert parse("d", "--mean", "-1e-3", "-2e-3").mean == (-1e-3, -2e-3)
    assert parse("d", "--text=a", "-b", "--short").text == ("a", "-b")
    assert parse("--pairs=a=1", "b=2", "d").pairs == ("a=1", "b=2")


@pytest.mark.parametrize("text", ["48,64", "48x64", "48 64"])
def test_a_size_may_be_written_as_people_write_it(text: str) -> None:
    assert parse("d", "--img-size", *text.split()).img_size == (48, 64)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["d", "--img-size", "1", "2", "3"], "`--img-size` is '1 2 3'; allowed is one side in pixels, or height and"),
        (["d", "--img-size", "big"], "`--img-size` is big; allowed is one side"),
        (["d", "--img-size"], "`--img-size` is nothing; allowed is one side"),
        (["d", "--lr", "fast"], "`--lr` is fast; allowed is a number"),
        (["d", "--sizes", "1.5"], "`--sizes` is 1.5; allowed is a list of whole numbers"),
        (["d", "--mode", "z"], "`--mode` is z; allowed is a or b+c"),
        (["d", "--modee", "a"], "unknown option `--modee`; did you mean --mode?"),
        (["d", "e"], "unexpected argument `e`"),
        (["d", "--lr"], "`--lr` is nothing; allowed is a number"),
        (["d", "--sizes", "--short"], "`--sizes` is nothing; allowed is a list of whole numbers"),
        (["d", "--one"], "`--one` is nothing; allowed is a list of texts"),
        (["d", "-x"], "unexpected argument `-x`"),
        (["d", "--foo"], "unknown option `--foo`; see"),  # nothing that is nearly it
        (["d", "--no-short"], "unknown option `--no-short`; did you mean --short?"),
        (["d", "--flag", "maybe"], "unexpected argument `maybe`"),
        (["d", "--no-flag=yes"], "`--no-flag` is yes; allowed is no value"),
        (["d", "--maybe=perhaps"], "`--maybe` is perhaps; allowed is yes or no"),
        ([], "`DATA` is missing; give a folder"),
    ],
)
def test_wrong_flags_are_one_line_too(argv: list[str], message: str, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(UsageError) as caught:
        parse(*argv)
    assert message in " ".join(str(caught.value).split())
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


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
    assert config == Example(data=Path("here"), img_size=(32, 48), lr=1e-3, sizes=(16,), mean=(0.1, 0.2), flag=False)
    assert parse("there", f"--config={tmp_path / 'c.yaml'}").data == Path("there")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed: 3", "unknown key `speed`; known: data"),
        ("size: 3", "unknown key `size`; did you mean `sizes`\\?$"),
        ("lr: fast", "c.yaml: `--lr` is fast; allowed is a number"),
        ("mode: c", "`--mode` is c; allowed is a or b\\+c"),
        ("sizes: [1.5]", "whole number"),
        ("flag: 3", "`--flag` is 3; allowed is true or false"),
        ("- a", "must hold"),
        ("a: [", "not valid YAML"),
    ],
)
def test_wrong_yaml_is_a_usage_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        parse("d", "--config", str(tmp_path / "c.yaml"))


@pytest.mark.parametrize("command", [["eval", "a", "b"], ["predict", "a", "b"], ["profile", "a"]], ids=str)
@pytest.mark.parametrize("threads", ["0", "99999"])
def test_numbers_of_threads_that_would_kill_the_process_are_refused(
    command: list[str], threads: str, capsys: pytest.CaptureFixture
) -> None:
    assert main([*command, "--threads", threads]) == 2
    assert f"`--threads` is {threads}; allowed is from 1 to" in capsys.readouterr().err


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


@pytest.mark.parametrize("argv", [["--help"], ["finetune", "--help-all"]], ids=str)
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


def test_an_output_without_the_letters_shows_numbers() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "vtk", "analyze", "--help-all"], capture_output=True, text=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    assert "extent of each axis, \\xb1 this many" in run.stdout
