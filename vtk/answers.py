"""``evaluate``, ``predict`` and ``embed``: metrics, labels and features of images, in any back-end."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn

from vtk import console
from vtk.data.pinning import pinned
from vtk.errors import UsageError
from vtk.evaluation.config import EvalConfig, PredictConfig
from vtk.options import expect
from vtk.runtime.backends.base import check_backend, needs_onnx
from vtk.runtime.embedding.config import EmbedConfig
from vtk.runtime.opening import open_source, open_with_notes
from vtk.runtime.prediction import PredictResult, predict_images
from vtk.runtime.source import Opening, Source

if TYPE_CHECKING:  # predicting does not need scikit-learn
    from vtk.evaluation.metrics import Metrics
    from vtk.runtime.corruptions import CorruptionResult
    from vtk.runtime.embedding.embed import EmbedResult
    from vtk.runtime.evaluation import EvalResult
    from vtk.runtime.source import Openable

Batches = Iterable[tuple[Tensor, Tensor]]


@overload
def evaluate(source: "Openable", config: EvalConfig, **opening: Unpack[Opening]) -> "EvalResult | CorruptionResult": ...
@overload
def evaluate(
    predict: Callable[[Tensor], Tensor],
    loader: Batches,
    classes: Sequence[str],
    *,
    device: torch.device | str = "cpu",
    show_progress: bool = True,
) -> "Metrics": ...
def evaluate(*given: Any, **options: Any) -> Any:
    """Evaluate a model on a folder of images; or, as in version 0.1, a function on a loader.

    ``evaluate(source, EvalConfig(data=FOLDER), **opening)`` is ``vtk eval``: size, preprocessing and class names come
    from the source, and with no further options a pack gives the metric of its training run.

    ``evaluate(predict, loader, classes, device="cpu", show_progress=True)`` takes a function from images (B, C, H, W)
    to logits (B, classes) and batches of images and labels, and returns `Metrics`.

    Args:
        given: source and config; or function, loader and class names. All may also be keywords.
        options: how to open the source, see `vtk.open_source`; or ``device`` and ``show_progress`` of the second form.

    Raises:
        UsageError: the source has no class names, or options contradict each other.
        DataError: the folder's classes are not the model's, or it has no images.
        UnavailableError: the requested back-end or device is not available.
    """
    if isinstance(options.get("config"), EvalConfig) or (len(given) == 2 and isinstance(given[1], EvalConfig)):
        return _evaluate(*given, **options)
    first = given[0] if given else options.get("predict")
    configs = any(isinstance(one, EvalConfig) for one in given)
    if callable(first) and not configs and len(given) + len(options.keys() & {"predict", "loader", "classes"}) == 3:
        from vtk.evaluation import metrics

        return metrics.evaluate(*given, **options)
    what = "a module" if isinstance(first, nn.Module) else repr(first)[:60]
    raise UsageError(
        f"`evaluate` does not take {what} in this form: call evaluate(source, EvalConfig(data=FOLDER)), or "
        "evaluate(predict, loader, classes)"
    )


def _evaluate(source: "Openable", config: EvalConfig, **opening: Unpack[Opening]) -> "EvalResult | CorruptionResult":
    from vtk.runtime.corruptions import evaluate_corruptions
    from vtk.runtime.evaluation import evaluate_source

    with pinned(config.cpus, config.threads) as threads:  # before a library counts the cores
        config = replace(config, threads=threads)
        if config.backend is not None:
            check_backend(config.backend)
        opened = open_with_notes(source, **opening)
        trust = opening.get("trust", False)
        reference = None if config.reference is None else open_source(config.reference, trust=trust)
        for note in reference.notes if reference else ():
            console.say(note)
        opened.require_description("eval")
        with runnable(opened, config.backend) as run:
            if config.corrupted:
                return evaluate_corruptions(run, config)
            return evaluate_source(run, config, reference=reference if run is opened else reference or opened)


def predict(source: "Openable", config: PredictConfig, **opening: Unpack[Opening]) -> PredictResult:
    """Label the images of ``config.images``, print a short table, and write ``config.out`` if given.

    For images in memory see `Task.predict`.

    Args:
        source: a path, a `Task`, a module with ``classes=``, or an open source.
        config: the images, and how the model runs; options that are None come from the card.
        opening: how to open the source, see `vtk.open_source`.

    Raises:
        UsageError: the source has no class names.
        DataError: no image could be read, or ``out`` is a file of another kind.
        UnavailableError: the requested back-end or device is not available.
    """
    expect(config, PredictConfig, "predict")
    with pinned(config.cpus, config.threads) as threads:
        if config.backend is not None:
            check_backend(config.backend)
        opened = open_with_notes(source, **opening)
        opened.require_description("predict")
        with runnable(opened, config.backend) as run:
            return predict_images(run, replace(config, threads=threads))


def embed(source: "Openable", config: EmbedConfig, **opening: Unpack[Opening]) -> "EmbedResult":
    """Write a row of pooled features, the classifier's input, for each image of ``config.images`` to ``config.out``.

    Args:
        source: a path, a timm model name, a `Task`, a timm model, or an open source.
        config: images, table, and how the model runs; options that are None come from the card.
        opening: how to open the source, see `vtk.open_source`.

    Raises:
        UsageError: the source or the back-end gives no features.
        DataError: no image could be read, or ``out`` is a file of another kind.
        UnavailableError: the requested back-end, device or package is not available.
    """
    from vtk.runtime.embedding.embed import FEATURES, check_features, embed_images

    expect(config, EmbedConfig, "embed")
    with pinned(config.cpus, config.threads) as threads:
        if config.backend is not None:
            check_backend(config.backend)
        opened = open_with_notes(source, features=True, **opening)
        check_features(opened, config.backend)
        with runnable(opened, config.backend, output=FEATURES) as run:
            return embed_images(run, replace(config, threads=threads))


@contextlib.contextmanager
def runnable(
    source: Source, backend: str | None, *, output: Literal["logits", "features"] = "logits"
) -> Iterator[Source]:
    """Yield a source that ``backend`` runs: the source itself, or a verified temporary ONNX file with this output.

    Raises:
        UsageError: the back-end does not exist.
        UnavailableError: it is not available.
    """
    if not needs_onnx(backend) or source.kind in ("onnx", "openvino"):
        yield source
        return
    check_backend(str(backend))
    from vtk_export.onnx.export import temporary_onnx  # needs packages that a machine for evaluation may lack

    with temporary_onnx(source, output=output) as onnx:
        yield onnx
