"""``evaluate``: the metric of training for anything that runs."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

from torch import Tensor, nn

from vtk import console
from vtk.answers.files import runnable
from vtk.errors import UsageError
from vtk.evaluation import metrics
from vtk.evaluation.config import EvalConfig
from vtk.evaluation.metrics import Metrics
from vtk.runtime.backend import check_backend
from vtk.runtime.evaluation import EvalResult, evaluate_source
from vtk.runtime.opening import open_and_tell
from vtk.runtime.source import Opening, open_source

if TYPE_CHECKING:
    from vtk.runtime.source import Openable

Batches = Iterable[tuple[Tensor, Tensor]]


@overload
def evaluate(source: "Openable", config: EvalConfig, /, **opening: Unpack[Opening]) -> EvalResult: ...
@overload
def evaluate(
    predict: Callable[[Tensor], Tensor], loader: Batches, classes: Sequence[str], /, **options: Any
) -> Metrics: ...
def evaluate(first: Any, second: Any, classes: Sequence[str] | None = None, /, **options: Any) -> Any:
    """Evaluate a model on a folder of images; or, as in version 0.1, a function on a loader.

    ``evaluate(source, EvalConfig(data=FOLDER), **opening)`` is ``vtk eval``: size, preprocessing and class names come
    from the source, and with no further options a pack gives the metric of its training run.

    ``evaluate(predict, loader, classes, device="cpu", show_progress=True)`` takes a function from images (B, C, H, W)
    to logits (B, classes) and batches of images and labels, and returns `Metrics`.

    Args:
        first: a path, a timm name, a `Task`, a module, an open source; or the function.
        second: an `EvalConfig`; or the loader.
        classes: of the second form: names of the classes.
        options: how to open the source, see `vtk.open_source`; or the options of the second form.

    Raises:
        UsageError: the source carries no class names, or options contradict each other.
        DataError: the folder's classes are not the model's, or it has no images.
        UnavailableError: a back-end or device asked for is not here.
    """
    if isinstance(second, EvalConfig):
        if classes is not None:
            raise UsageError("`evaluate` of a source takes a config alone; give class names as classes=[…]")
        return _evaluate(first, second, **options)
    if callable(first) and classes is not None:
        return metrics.evaluate(first, second, classes, **options)
    what = "a module" if isinstance(first, nn.Module) else repr(first)[:60]
    raise UsageError(f"`evaluate` got {what} and no EvalConfig; give evaluate(source, EvalConfig(data=FOLDER)), or "
                     "evaluate(predict, loader, classes)")  # fmt: skip


def _evaluate(source: "Openable", config: EvalConfig, **opening: Unpack[Opening]) -> EvalResult:
    if config.backend is not None:
        check_backend(config.backend)
    opened = open_and_tell(source, **opening)
    reference = None if config.reference is None else open_source(config.reference)
    for note in reference.notes if reference else ():
        console.say(note)
    opened.require_description("eval")
    with runnable(opened, config.backend) as run:
        return evaluate_source(run, config, reference=reference if run is opened else reference or opened)
