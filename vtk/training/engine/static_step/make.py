"""Makes the static step of a run, or gives the reason why it has none."""

from collections.abc import Sequence

import torch

from vtk import console
from vtk.training.engine.gradients import Means
from vtk.training.engine.learner import Learner
from vtk.training.engine.static_step import rules
from vtk.training.engine.static_step.graph import CudaRecorder
from vtk.training.engine.static_step.step import Recorder, StaticStep
from vtk.training.engine.step_rule import StepRule


def recorder_for(device: torch.device) -> Recorder | None:
    """Return what records steps on ``device``; None where nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None


def make_static_step(
    config: rules.GraphConfig, means: Means, learner: Learner, step_rule: StepRule, images: Sequence[int]
) -> StaticStep | None:
    """Return the static step of a run; None where it has none, which a line says if a graph is wanted on a GPU.

    Args:
        config: of the run.
        means: of the run.
        learner: that all steps update.
        step_rule: of the run.
        images: of every step of an epoch; the first stands for those that a graph does.

    Raises:
        UsageError: ``--cuda-graph on``, and the run has none.
        UnavailableError: the same, because it does not train on a GPU.
    """
    ranks, scaler = means.ranks, means.precision.scaler
    about = {
        "precision": "fp16" if scaler.skips else means.precision.name,
        "passes": step_rule.passes,
        "joint": means.joint,
    }
    rules.check_graph(config, ranks.device, ranks.world, **about)  # type: ignore[arg-type]
    why = rules.reason_against(config, ranks.device, ranks.world, objective=means.objective, **about)  # type: ignore[arg-type]
    if why is None:
        spare = max((n for n in images if n != images[0]), default=0) / images[0]
        recorder = None if config.cuda_graph == "off" else recorder_for(ranks.device)
        return StaticStep(means, learner, recorder, spare)
    if config.cuda_graph != "off" and ranks.device.type in rules.KINDS and ranks.main:
        console.say(f"--cuda-graph: steps run without a graph, since {why}")
    return None
