"""Keeps the current folder off the module search path, in this process and in every interpreter it starts.

A command is often run in a folder of somebody else's files. A file there called ``msvcrt.py`` would be imported in
place of the module of that name. ``python -P`` and ``PYTHONSAFEPATH`` leave that folder off the search path; an empty
part of ``PYTHONPATH`` puts it there all the same. Imports nothing but what every interpreter has loaded already.
"""

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_left = False


def leave_current_folder() -> None:
    """Remove the current folder from the search path of ``python -m vtk`` and of its children; explicit entries stay.

    It stays if the toolkit itself is imported from it: a checkout that is not installed.
    """
    global _left
    if _left:
        return
    _left, here = True, _here()
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    drop = 1 if by_module() and sys.path[:1] == [here] else 0
    drop += parts != [""] and "" in parts and here not in map(os.path.abspath, filter(None, parts))
    for _ in range(drop):
        if here in sys.path and (here != _ROOT or sys.path.count(here) > 1):
            sys.path.remove(here)
    sys.path[:] = [entry for entry in sys.path if entry]
    os.environ.update(_settings())


def leave_plot_settings() -> None:
    """Import matplotlib without the ``matplotlibrc`` of the current folder, which it reads before the user's own.

    Such a file may start LaTeX and change every plot. Call it before there are threads: it changes the current folder
    during the import. Without such a file it does nothing.
    """
    if not os.path.exists("matplotlibrc"):
        return
    here = os.getcwd()
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        pass
    finally:
        os.chdir(here)


def by_module() -> bool:
    """Return whether this is ``python -m vtk``, for which Python puts the current folder first."""
    words = getattr(sys, "orig_argv", [])
    return not sys.flags.safe_path and any(
        word == "-mvtk" or (word.startswith("-") and word.endswith("m") and after == "vtk")
        for word, after in zip(words, [*words[1:], ""], strict=True)
    )


def as_command() -> bool:
    """Return whether this process is the command ``vtk``, and not another program that imports it."""
    name = sys.argv[0] if getattr(sys, "argv", None) else ""
    return (name == "-m" and by_module()) or os.path.basename(name) in ("vtk", "vtk.exe")


def child(*arguments: str) -> list[str]:
    """Return the command line of another interpreter; run it with `environment`."""
    return [sys.executable, "-P", *arguments]


def environment() -> dict[str, str]:
    """Return the variables of a process that starts interpreters."""
    return {**os.environ, **_settings()}


def search_path() -> list[str]:
    """Return the module search path of a child: this process's own, without the current folder."""
    here = _here()
    entries = [entry for entry in sys.path if entry and os.path.abspath(entry) != here]
    return entries if _ROOT in entries else [_ROOT, *entries]


def _settings() -> dict[str, str]:
    settings = {"PYTHONSAFEPATH": "1"}
    if "PYTHONPATH" in os.environ:
        settings["PYTHONPATH"] = os.pathsep.join(filter(None, os.environ["PYTHONPATH"].split(os.pathsep)))
    return settings


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return ""
