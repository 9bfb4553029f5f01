"""``predict``: labels for an image or a folder of them, in any back-end."""

from typing import TYPE_CHECKING, Unpack

from vtk.answers.files import runnable
from vtk.evaluation.config import PredictConfig
from vtk.options import expect
from vtk.runtime.backend import check_backend
from vtk.runtime.opening import open_and_tell
from vtk.runtime.prediction import PredictResult, predict_images
from vtk.runtime.source import Opening

if TYPE_CHECKING:
    from vtk.runtime.source import Openable


def predict(source: "Openable", config: PredictConfig, **opening: Unpack[Opening]) -> PredictResult:
    """Label the images of ``config.images``, print a short table and write ``config.out``, if that is given.

    For images in memory there is `Task.predict`.

    Args:
        source: a path, a `Task`, a module with ``classes=``, or an open source.
        config: which images, and how the model runs; what is None comes from the card.
        opening: how to open the source, see `vtk.open_source`.

    Raises:
        UsageError: the source carries no class names.
        DataError: no image could be read, or ``out`` is a file of another kind.
        UnavailableError: a back-end or device asked for is not here.
    """
    expect(config, PredictConfig, "predict")
    if config.backend is not None:
        check_backend(config.backend)
    opened = open_and_tell(source, **opening)
    opened.require_description("predict")
    with runnable(opened, config.backend) as run:
        return predict_images(run, config)
