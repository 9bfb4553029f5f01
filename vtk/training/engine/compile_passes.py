"""``--compile``: ``torch.compile`` for the forward and backward passes of training, and for nothing else.

The compiled function stands in the model's place for ``forward`` while steps are taken. So hooks (the casts of 16-bit
training) and DistributedDataParallel see the model they know, names of tensors stay plain, and evaluation, packs and
exports meet the model as it is.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vtk import console
from vtk.errors import UnavailableError
from vtk.models.compiler import check_compiler, failure, quiet

BACKEND = "inductor"
"""Of torch.compile."""


def check_compile(on: bool) -> None:
    """Refuse ``--compile`` where nothing can be compiled; does nothing unless ``on``.

    Raises:
        UnavailableError: there is no C++ compiler.
    """
    if on and BACKEND == "inductor":
        check_compiler("`--compile`", "leave it out")


class CompiledForward:
    """Compiles the forward pass of a model for the time of an epoch's steps.

    A batch that is not full would be a program of its own: if the sizes differ, the first program is compiled for any
    number of images. One image remains a case apart, as torch has it.

    Args:
        model: is changed only inside of `training`.
        sizes: images of every batch of an epoch.
        checkpointing: whether the model computes its blocks twice.

    Attributes:
        programs: graphs that were compiled so far.
    """

    def __init__(self, model: nn.Module, sizes: Sequence[Sequence[int]], *, checkpointing: bool) -> None:
        # imported here because it takes a second
        self.dynamo, self.inductor = (importlib.import_module(f"torch.{name}") for name in ("_dynamo", "_inductor"))
        check_compile(True)
        quiet()
        self.model, self.programs = model, 0
        self._varies = len({n for each in sizes for n in each}) > 1
        self.checkpointing = checkpointing
        self.dynamo.reset()  # of a code object it keeps eight programs, whichever model they are of
        self._compiled: Callable[..., Any] = torch.compile(model.forward, backend=self._count)

    def _count(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.programs += 1
        compiled: Callable[..., Any] = self.dynamo.lookup_backend(BACKEND)(graph, inputs)
        return compiled

    def _forward(self, *images: Tensor, **kwargs: Any) -> Any:
        if self._varies:
            for batch in images:
                if len(batch) > 1:
                    self.dynamo.maybe_mark_dynamic(batch, 0)
        return self._compiled(*images, **kwargs)

    @contextlib.contextmanager
    def training(self, show: bool) -> Iterator[None]:
        """Let the model run its compiled forward pass inside of the context; with ``show``, say what was compiled.

        Random numbers are drawn as without compilation, so that the same seed drops the same paths.

        Raises:
            UnavailableError: the compiler failed.
        """
        before, counters = self.programs, self.dynamo.utils.counters["graph_break"]
        broken = sum(counters.values())
        own = self.model.__dict__.get("forward")
        self.model.__dict__["forward"] = self._forward
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.inductor.config.patch(fallback_random=True))
                if self.checkpointing:  # DDP's own splitting of a graph knows no blocks that are computed twice
                    stack.enter_context(self.dynamo.config.patch(optimize_ddp=False))
                yield
        except Exception as error:
            if (why := failure(error)) is None or isinstance(error, torch.OutOfMemoryError):
                raise
            raise UnavailableError(f"`--compile`: torch.compile failed here ({why}); leave it out") from error
        finally:
            del self.model.__dict__["forward"]
            if own is not None:
                self.model.__dict__["forward"] = own
        if show and self.programs > before:
            self._tell(self.programs - before, sum(counters.values()) - broken, list(counters))

    def _tell(self, compiled: int, breaks: int, reasons: Sequence[str]) -> None:
        console.say(
            f"--compile: {compiled} {'program' if compiled == 1 else 'programs'} compiled, {self.programs} in all"
        )
        if breaks:
            why = next(iter(reasons[-1].splitlines()), "")
            console.warn(f"--compile: {type(self.model).__name__} is compiled in pieces, {breaks} breaks ({why})")


@contextlib.contextmanager
def _plain(show: bool) -> Iterator[None]:
    yield


def steps_of(
    model: nn.Module, sizes: Sequence[Sequence[int]], *, compile: bool, checkpointing: bool
) -> Callable[[bool], contextlib.AbstractContextManager[None]]:
    """Return the context in which an epoch's steps run, compiled or not."""
    return CompiledForward(model, sizes, checkpointing=checkpointing).training if compile else _plain
