"""The ``vtk`` command: runs a subcommand, and reports errors as one line and an exit code."""

import difflib
import importlib
import io
import os
import sys
from collections.abc import Sequence

from vtk import __version__, console, stdio
from vtk._path import leave_current_folder, leave_plot_settings
from vtk.commands import COMMANDS
from vtk.errors import StoppedError, UsageError, VtkError
from vtk.packages import explain


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; never raises for a user's mistake (``--debug`` shows the traceback)."""
    args = list(sys.argv[1:] if argv is None else argv)
    console.set_json("--json" in args)
    console.set_command(True)
    try:
        return _run_reported(args)
    except BrokenPipeError:
        # the reader (head, less) went away: nothing to report, and nothing more to flush to it
        stdio.discard_unwritten()
        return 0
    except OSError as error:
        if not stdio.is_full(error):
            raise
        stdio.discard_unwritten()
        console.complain(f"vtk: error: cannot write the output: {error.strerror}; write to another disk or file")
        return 1
    finally:
        console.set_json(False)
        console.set_command(False)


def _run_reported(args: list[str]) -> int:
    """Run one command, report its error if it has one, and return the exit code after its output is written."""
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except SystemExit:
        sys.stdout.flush()
        raise
    except StoppedError as error:
        if os.environ.get("RANK", "0") == "0":  # only one of several processes reports it
            console.complain(f"vtk {args[0]}: {error}")
            console.emit_json({"error": str(error), "exit_code": error.exit_code})
        return error.exit_code
    except VtkError as error:
        return _report(error, error.exit_code, args)
    except ModuleNotFoundError as error:
        known = explain(error)
        if known is None:
            console.emit_json({"error": f"{type(error).__name__}: {error}", "exit_code": 1})
            raise
        return _report(known, known.exit_code, args)
    except KeyboardInterrupt:
        console.complain("vtk: stopped")
        console.emit_json({"error": "stopped", "exit_code": 130})
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            return _report(error, 1, args)
        console.emit_json({"error": f"{type(error).__name__}: {error}", "exit_code": 1})
        raise  # a bug of the toolkit: show its traceback


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "--help-all", "help"):
        print(_help())
        return 0
    if args[0] in ("-V", "--version", "version"):
        print(f"vtk {__version__} (ViT toolkit, distribution vit-toolkit)")
        return 0
    return importlib.import_module(_module(args[0])).main(args[1:])


def entry() -> None:
    """Console-script entry point."""
    leave_current_folder()
    if stdio.open_closed() and "--json" in sys.argv:
        console.complain("vtk: error: --json writes to standard output, which is closed")
        sys.exit(1)
    leave_plot_settings()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal cannot show becomes an escape
            stream.reconfigure(errors="backslashreplace")
    console.guard_messages()
    try:
        code = main()
    except Exception:  # a bug of the toolkit
        console.show_traceback()
        code = 1
    sys.exit(code)


def _module(command: str) -> str:
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean `vtk {close[0]}`?" if close else f"choose one of: {', '.join(COMMANDS)}"
        raise UsageError(f"unknown command `{command}`; {hint}")
    return COMMANDS[command].module


def _report(error: Exception, code: int, args: Sequence[str]) -> int:
    if "--debug" in args:
        console.show_traceback()
    line = " ".join(str(error).split())
    console.complain(f"vtk {args[0]}: error: {line}")
    console.emit_json({"error": line, "exit_code": code})
    return code


def _help() -> str:
    lines = [
        "usage: vtk COMMAND [OPTIONS]",
        "",
        "Fine-tune a Vision Transformer by its attention weights, share its FFN weights",
        "between tasks, export it, and measure its latency.",
        "",
    ]
    lines += [f"  {name:<11} {command.help}" for name, command in COMMANDS.items()]
    lines += [
        "",
        "vtk COMMAND --help shows the options. Every command takes --json, --debug and",
        "--config FILE.yaml.",
        "",
        "exit codes: 0 done, 2 usage, 3 data or base, 4 verification failed,",
        "            5 a device, back-end or package asked for is missing, 1 the rest;",
        "            130 stopped by Ctrl-C, 143 by SIGTERM: training saves first",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    entry()
