"""Keeps modules of the current folder out, in this process and in every interpreter that it starts.

A command is often run in a folder of somebody else's files, where a file called ``msvcrt.py`` is imported by whatever
asks for a module of that name. ``python -P`` and ``PYTHONSAFEPATH`` leave that folder off the search path; an empty
part of ``PYTHONPATH`` puts it there all the same. Imports nothing but what every interpreter has loaded already.
"""

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_left = False


def leave_current_folder() -> None:
    """Take the current folder off the search path of ``python -m vtk`` and of children; what names it itself stays.

    It stays where this toolkit lies in it and nowhere else: a checkout that is not installed.
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


def by_module() -> bool:
    """Tell whether this is ``python -m vtk``, for which Python puts the current folder first."""
    words = sys.orig_argv
    return not sys.flags.safe_path and any(
        word == "-mvtk" or (word.startswith("-") and word.endswith("m") and after == "vtk")
        for word, after in zip(words, [*words[1:], ""], strict=True)
    )


def child(*arguments: str) -> list[str]:
    """Return the command line of another interpreter; run it with `environment`."""
    return [sys.executable, "-P", *arguments]


def environment() -> dict[str, str]:
    """Return the variables of a process that starts interpreters."""
    return {**os.environ, **_settings()}


def search_path() -> list[str]:
    """Return where a child looks for modules: as this process does, but not in the current folder."""
    here = _here()
    found = [entry for entry in sys.path if entry and os.path.abspath(entry) != here]
    return found if _ROOT in found else [_ROOT, *found]


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
