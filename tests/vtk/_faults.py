"""File operations that fail or never return: what a full disk, a read-only one and `kill -9` look like from inside."""

import contextlib
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

_CHANGES = {"os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate"}
_hook: list[Callable[[str], None]] = []
_installed: list[bool] = []


def tree(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file in a folder, by its path inside."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def killed_at(number: int, action: Callable[[], object], folder: Path) -> bool:
    """Do ``action`` in a process of its own that dies before the file operation of that number inside ``folder``.

    Operations count from 0. A safetensors or torch file is three of them: not begun, half there, whole. The process is
    a fork of this one, so ``action`` may be a closure; it cannot be one that trains (see :func:`training_killed_at`).

    Returns:
        Whether the process died so; False when the action was done before.
    """
    child = os.fork()
    if child == 0:
        try:
            _do_and_die(number, action, folder)
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(1)
    _, status = os.waitpid(child, 0)
    return _died(os.waitstatus_to_exitcode(status))


def training_killed_at(number: int, action: Callable[[], object], folder: Path) -> bool:
    """Do as :func:`killed_at` in a process that is no fork of this one; ``action`` is pickled (``functools.partial``).

    A fork of a process that has computed gradients cannot compute any: autograd's threads do not come along.
    """
    process = forkserver().Process(target=_do_and_die, args=(number, action, folder))
    process.start()
    process.join()
    assert process.exitcode is not None
    return _died(process.exitcode)


def forkserver() -> ForkServerContext:
    """Return what starts processes that have the training code imported and nothing run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vtk.training.finetune", "vtk.training.train", "vtk.evaluation.result_files"])
    return context


def _do_and_die(number: int, action: Callable[[], object], folder: Path) -> None:
    _count(number, folder, lambda: os.kill(os.getpid(), signal.SIGKILL))
    action()


def _died(code: int) -> bool:
    assert code in (0, -signal.SIGKILL), "the action failed by itself"
    return code != 0


@contextlib.contextmanager
def failing_at(number: int, error: OSError, folder: Path) -> Iterator[list[str]]:
    """Let the file operation of that number inside ``folder`` fail, once; yields its name, empty if it never came."""
    met: list[str] = []

    def fail(event: str) -> None:
        met.append(event)
        raise OSError(error.errno, error.strerror)

    with _only_here(number, folder, fail):
        yield met


@contextlib.contextmanager
def files_below(size: int) -> Iterator[None]:
    """Let no process here write a file of more bytes: Python's, torch's and safetensors' own writers all meet it.

    Python itself writes compiled modules without looking at what fitted, and a cut one breaks every later import: none
    is written here.
    """
    before, compiled = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    variable = os.environ.get("PYTHONDONTWRITEBYTECODE")
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN  # as Python starts; else the process would die
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = compiled
        if variable is None:
            del os.environ["PYTHONDONTWRITEBYTECODE"]
        else:
            os.environ["PYTHONDONTWRITEBYTECODE"] = variable


def _count(number: int, folder: Path, act: Callable[[], None]) -> None:
    """Call ``act`` before the operation of that number: of Python by its audit events, of other writers by wrappers."""
    _listen(_counter(number, folder, lambda event: act()))
    turn = _hook[-1]
    import safetensors.torch
    import torch

    def wrap(write: Callable[..., Any], path: Callable[..., Path]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            turn("begin")
            result = write(*args, **kwargs)
            file = path(*args, **kwargs)
            whole = file.read_bytes()
            file.write_bytes(whole[: len(whole) // 2])
            turn("half")
            file.write_bytes(whole)
            turn("end")
            return result

        return wrapped

    safetensors.torch.save_file = wrap(safetensors.torch.save_file, lambda tensors, file, **_: Path(file))
    torch.save = wrap(torch.save, lambda value, file: Path(file))


@contextlib.contextmanager
def _only_here(number: int, folder: Path, act: Callable[[str], None]) -> Iterator[None]:
    _listen(_counter(number, folder, act))
    try:
        yield
    finally:
        _hook.clear()


def _counter(number: int, folder: Path, act: Callable[[str], None]) -> Callable[[str], None]:
    left = [number]

    def turn(event: str) -> None:
        left[0] -= 1
        if left[0] == -1:
            act(event)

    turn.folder = os.fspath(folder)  # type: ignore[attr-defined]
    return turn


def _listen(turn: Callable[[str], None]) -> None:
    _hook[:] = [turn]
    if not _installed:  # an audit hook stays until the process ends
        _installed.append(True)
        sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _hook or (event not in _CHANGES and event != "open"):
        return
    if event == "open" and args[1] is not None and not set(args[1]) & set("wax+"):
        return  # for reading; without a mode it is os.open, which is for a flush to the disk
    turn = _hook[-1]
    name = args[0]
    if event in ("os.remove", "os.rmdir") and args[1] >= 0:  # of `shutil.rmtree`, which works from folder to folder
        turn(event)
    elif isinstance(name, (str, bytes, os.PathLike)) and os.fsdecode(name).startswith(turn.folder):  # type: ignore[attr-defined]
        turn(event)
