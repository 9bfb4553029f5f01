"""All experiments, and which of them run on which images with which settings."""

import json
from collections.abc import Sequence
from dataclasses import replace

from papers import a_three_things, b_context_broadcasting, c_how_vits_work, d_sam, e_scaled_relu
from papers.experiment import Experiment, Settings
from papers.gpu import at_cifar_scale

EXPERIMENTS: tuple[Experiment, ...] = tuple(
    experiment
    for module in (a_three_things, b_context_broadcasting, c_how_vits_work, d_sam, e_scaled_relu)
    for experiment in module.EXPERIMENTS
)


def choose(experiments: Sequence[Experiment], only: Sequence[str], kind: str) -> list[Experiment]:
    """Return the experiments that run on images of a kind, with the settings that they have there.

    Args:
        experiments: of which to choose.
        only: papers (``A``) or experiments (``A/hmlp``); empty for all.
        kind: of `papers.image_sets.ImageSet`.
    """
    asked = [e for e in experiments if not only or e.paper in only or e.key in only]
    return [replace(e, settings=e.on(kind)) for e in asked if e.on(kind) is not None]  # type: ignore[arg-type]


def quick(experiment: Experiment) -> Experiment:
    """Return an experiment whose runs have one epoch."""

    def short(settings: Settings | None) -> Settings | None:
        return settings and {
            name: {**value, "epochs": 1} if isinstance(value, dict) and "epochs" in value else value
            for name, value in settings.items()
        }

    return replace(experiment, settings=short(experiment.settings), photographs=short(experiment.photographs))  # type: ignore[arg-type]


def current_settings() -> set[tuple[str, str, str]]:
    """Return (paper, experiment, settings as rows have them) of all that would be run now."""
    return {
        (e.paper, e.name, e.settings_text())
        for known in (EXPERIMENTS, [at_cifar_scale(e) for e in EXPERIMENTS])
        for kind in ("digits", "photographs") for e in choose(known, (), kind)
    }  # fmt: skip


def same_settings(text: str) -> str:
    """Return settings of a row as `Experiment.settings_text` writes them."""
    return json.dumps(json.loads(text), sort_keys=True)
