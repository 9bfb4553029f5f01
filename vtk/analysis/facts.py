"""Collects what a report says beside its numbers, and what results depend on: model, images, device, protocol."""

import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any

import torch

from vtk import __version__, console
from vtk.analysis.config import AnalyzeConfig
from vtk.analysis.images import Images
from vtk.analysis.protocols import CURVATURE, PROTOCOLS, describe, settings_of
from vtk.analysis.sources import describe_input
from vtk.runtime.source import Source


def facts_of(
    source: Source, of: Mapping[str, Images], config: AnalyzeConfig, *, device: torch.device, command: str
) -> dict[str, Any]:
    """Return the facts as JSON values, and print the protocol's.

    Args:
        source: the model.
        of: the images of each diagnostic, by name.
        config: options.
        device: where it is measured.
        command: that was given.
    """
    shape = source.card.input
    return {
        "model": source.card.model.name,
        "source": str(source.path or source.name),
        "data": str(config.data),
        "images": f"{_listed(config, of)}, drawn with seed {config.seed}",
        "images digest": _digests(of),
        "input": f"{shape.in_chans}×{shape.height}×{shape.width}",
        "device": str(device),
        "command": command,
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": f"vtk {__version__}, torch {torch.__version__}",
        **_protocol(config, of),
    }


def identity_of(source: Source, digest: str, images: Images, *, device: str, world: int) -> dict[str, Any]:
    """Return what results depend on beside options and images, as JSON values.

    Args:
        source: the model.
        digest: of its weights.
        images: of any diagnostic.
        device: its type.
        world: number of processes.
    """
    return {
        "model": digest,
        "input": describe_input(source),
        "data": images.folder_digest(),
        "device": device,
        "world": world,
        "vtk": __version__,  # the next version may measure differently
    }


def _listed(config: AnalyzeConfig, of: Mapping[str, Images]) -> str:
    """Return how many images of which kind the diagnostics take."""
    by_kind: dict[str, list[str]] = {}
    for name, images in of.items():
        by_kind.setdefault(_taken(config, name, images), []).append(name)
    if len(by_kind) == 1:
        return next(iter(by_kind))
    return "; ".join(f"{kind} ({', '.join(names)})" for kind, names in by_kind.items())


def _taken(config: AnalyzeConfig, name: str, images: Images) -> str:
    """Return how many images of which kind a diagnostic takes: of those that are loaded, curvature takes the first."""
    count = len(images.samples)
    if name in CURVATURE:
        count = min(count, settings_of(config, name).hessian_images or count)
    return console.count(count, f"{images.kind} image")


def _digests(of: Mapping[str, Images]) -> Any:
    """Return the hash of the images, or of each kind of them."""
    digests = {f"{len(images.samples)} {images.kind}": images.digest() for images in of.values()}
    return digests if len(digests) > 1 else next(iter(digests.values()))


def _protocol(config: AnalyzeConfig, of: Mapping[str, Images]) -> dict[str, Any]:
    """Return the facts of the protocol, and print them with the images that there are; empty without one."""
    if config.protocol is None:
        return {}
    paper = PROTOCOLS[config.protocol].paper
    console.say(f"protocol {config.protocol} ({paper})")
    settings = {}
    for name, images in of.items():
        console.say(f"  {describe(config, name)}: {_taken(config, name, images)}")
        settings[name] = {
            **dataclasses.asdict(settings_of(config, name)), "images": len(images.samples), "kind": images.kind,
        }  # fmt: skip
    return {"protocol": f"{config.protocol} ({paper})", "protocol settings": settings}
