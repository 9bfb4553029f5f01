"""The callbacks of a run: the run's own and the user's, and the order in which they are called."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from vtk.errors import UsageError
from vtk.training.engine.callbacks import Callback, Control, EpochInfo, EpochStart, Kept, SaveInfo, StepInfo
from vtk.training.engine.processes import Ranks


class Callbacks:
    """Those of a run.

    Args:
        user: of the user; they are called last.
        own: of the run itself: tables, trackers, progress.
        control: shared with the callbacks of other tasks of the run.
        task: name of the task, in a run of several.

    Raises:
        UsageError: an object that is no callback.
    """

    def __init__(
        self,
        user: Sequence[Callback] = (),
        own: Sequence[Callback] = (),
        control: Control | None = None,
        task: str = "",
    ) -> None:
        self.user = check_callbacks(user)
        self.own, self.control, self.task = tuple(own), control or Control(), task
        self._waiting: list[Callable[[Callback], None]] = []

    @property
    def all(self) -> tuple[Callback, ...]:
        """The run's own, then the user's."""
        return (*self.own, *self.user)

    def beside(self, *own: Callback) -> "Callbacks":
        """Return the user's callbacks with other ones of the run, under the same control."""
        return Callbacks(self.user, own, self.control, self.task)

    def attach(self, *own: Callback) -> None:
        """Let these be the run's own from now on."""
        self.own = own

    @contextlib.contextmanager
    def steps(
        self, epoch: int, epochs: int, steps: int, images: int, steps_done: int = 0, images_done: int = 0
    ) -> Iterator[None]:
        """Enclose the steps of an epoch."""
        info = EpochStart(epoch, self.control, epochs, steps, images, steps_done, images_done)
        try:
            for callback in self.all:
                callback.on_epoch_start(info)
            yield
        finally:
            for callback in self.all:
                callback.on_steps_end()

    def step(self, info: StepInfo) -> None:
        """Call all callbacks after a step."""
        for callback in self.all:
            callback.on_step(info)

    def epoch(self, row: Mapping[str, float], summary: str, *, best: bool) -> None:
        """Call the callbacks after an epoch whose numbers are ``row``: the run's own at once, the user's at `flush`."""
        epoch, loss, lr = int(row["epoch"]), row["loss"], row["lr"]
        info = EpochInfo(epoch, self.control, loss, lr, dict(row), best, self.task, summary)
        self._call(lambda callback: callback.on_epoch(info))

    def save(self, what: Kept, path: Path, epoch: int, *, best: bool = False) -> None:
        """Call the callbacks after a file was written: the run's own at once, the user's at `flush`."""
        info = SaveInfo(epoch, self.control, what, path, best, self.task)
        self._call(lambda callback: callback.on_save(info))

    def _call(self, call: Callable[[Callback], None]) -> None:
        for callback in self.own:
            call(callback)
        self._waiting.append(call)

    def flush(self) -> None:
        """Make the pending calls of the user's callbacks: once all is saved, so that no error of theirs loses it."""
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            for callback in self.user:
                call(callback)

    def end(self) -> None:
        """Call ``on_end`` of each, even where another one fails."""
        with contextlib.ExitStack() as stack:
            for callback in reversed(self.all):
                stack.callback(callback.on_end)

    def stopped(self, ranks: Ranks) -> bool:
        """Whether the run is to stop; all processes call this at the same time, and get the same answer."""
        if ranks.world == 1:
            return self.control.stop
        return bool(ranks.sum(torch.tensor(float(self.control.stop), device=ranks.device)))


def check_callbacks(user: Sequence[Callback]) -> tuple[Callback, ...]:
    """Return callbacks as a tuple.

    Raises:
        UsageError: an object that is no callback.
    """
    for one in user if isinstance(user, (list, tuple)) else (user,):
        if not isinstance(one, Callback):
            raise UsageError(f"`callbacks` has {one!r:.80}; give a list of objects of subclasses of vtk.Callback")
    if isinstance(user, Callback):
        raise UsageError(f"`callbacks` is a {type(user).__name__}; give a list: callbacks=[…]")
    return tuple(user)


def main_callbacks(user: Sequence[Callback], ranks: Ranks) -> Callbacks:
    """Return a user's callbacks for the main process, and none for the others.

    Raises:
        UsageError: an object that is no callback.
    """
    callbacks = Callbacks(user)
    return callbacks if ranks.main else Callbacks()
