"""Standard streams that are closed, full, or pipes nobody reads: no traceback, and the exit code says what happened."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vtk import __main__, console

FULL = Path("/dev/full")


def run(*args: str, unbuffered: bool = False, **streams: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1" if unbuffered else ""}
    streams = {"stderr": subprocess.PIPE} | streams
    return subprocess.run(
        [sys.executable, "-m", "vtk", *args], env=environment, text=True, timeout=60, check=False, **streams
    )


@pytest.fixture
def unread() -> Any:
    """The writing end of a pipe whose reader has gone."""
    out, into = os.pipe()
    os.close(out)
    yield into
    os.close(into)


@pytest.mark.parametrize(("args", "unbuffered"), [(["--help"], True), (["doctor", "--help"], False)])
def test_a_reader_that_went_away_is_no_error(unread: int, args: list[str], unbuffered: bool) -> None:
    done = run(*args, stdout=unread, unbuffered=unbuffered)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("args", "unbuffered"), [(["--help"], False), (["nosuch", "--json"], True)])
@pytest.mark.skipif(not FULL.exists(), reason="the system has no device that is always full")
def test_output_that_cannot_be_written_is_one_line_and_no_success(args: list[str], unbuffered: bool) -> None:
    with FULL.open("w") as full:
        done = run(*args, stdout=full, unbuffered=unbuffered)
    assert done.returncode == 1 and "No space left on device" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 2


@pytest.mark.parametrize(
    ("words", "closed", "code"),
    [
        ("--help", (0, 1), 0), ("nosuch --json", (1,), 1), ("nosuch", (1,), 2), ("--version", (0, 1, 2), 0),
    ],
)  # fmt: skip
def test_closed_streams_are_the_null_device(words: str, closed: tuple[int, ...], code: int) -> None:
    shell = " ".join([f"{sys.executable} -m vtk {words}", *(f"{n}{'<' if n == 0 else '>'}&-" for n in closed)])
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code and "Traceback" not in done.stderr


def test_the_result_of_a_command_that_nobody_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within a command, too: an error that is raised while its result is written."""
    for error, code, line in (
        (BrokenPipeError(32, "Broken pipe"), 0, ""),
        (OSError(28, "No space left on device"), 1, "space"),
    ):

        def emit(value: Any, error: OSError = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(console, "emit_json", emit)
            assert __main__.main(["nosuch", "--json"]) == code
        assert line in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setattr(__main__, "_run", lambda args: (_ for _ in ()).throw(OSError(13, "denied")))
    with pytest.raises(OSError, match="denied"):  # no stream's: a fault of the toolkit
        __main__.main(["doctor"])
