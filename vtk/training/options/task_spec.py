"""Parses tasks on a command line: ``--task NAME=FOLDER@SIZE`` and ``--init-from NAME=PACK``."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from vtk.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
# all that a run of any command leaves in its folder (`vtk.training.runs.outputs`), which --overwrite clears away
_RESERVED = frozenset(
    "last task task-last task-small adapter last.old task.old task-last.old task-small.old adapter.old config.yaml "
    "metrics.csv metrics.jsonl curves.png confusion.png per_class.csv audit.json census.json images.csv trackers.json "
    "tensorboard wandb mlruns model.safetensors model-last.safetensors backbone.safetensors tokenizer.safetensors "
    "reconstruction.png similarity.png".split()
)


@dataclass(frozen=True)
class TaskSpec:
    """One of the tasks of a run.

    Attributes:
        name: of its folder under the run, and in a bank.
        data: folder of images.
        size: pixels, one side or height and width; None for the run's ``--img-size``.
    """

    name: str
    data: Path
    size: int | tuple[int, int] | None = None


def parse_tasks(texts: Sequence[str]) -> tuple[TaskSpec, ...]:
    """Read ``NAME=FOLDER``, ``NAME=FOLDER@384`` and ``NAME=FOLDER@384x512`` (height first).

    Raises:
        UsageError: a text of another form, a name that cannot be a folder's, or a name given twice.
    """
    specs = tuple(map(_parse, texts))
    for i, spec in enumerate(specs):
        # file systems that take upper and lower case for one would put both into one folder
        if spec.name.lower() in {s.name.lower() for s in specs[:i]}:
            raise UsageError(f"`--task` names `{spec.name}` twice; give each task a name of its own")
    return specs


def _parse(text: str) -> TaskSpec:
    name, equals, rest = text.partition("=")
    if not equals or not rest:
        raise UsageError(f"`--task` {text!r} is not NAME=FOLDER or NAME=FOLDER@SIZE, such as cars=data/cars@384")
    if not _NAME.fullmatch(name) or name.lower() in _RESERVED or name.endswith("."):
        raise UsageError(
            f"`--task` {text!r}: the name {name!r} cannot be a folder of the run; use letters, digits, - and _"
        )
    sized = re.fullmatch(r"(?P<folder>.+)@(?P<height>\d{1,5})(?:[x×](?P<width>\d{1,5}))?", rest, re.DOTALL)
    if sized is None:
        return TaskSpec(name, Path(rest))
    height, width = int(sized["height"]), sized["width"]
    return TaskSpec(name, Path(sized["folder"]), height if width is None else (height, int(width)))


def parse_starts(texts: Sequence[str], names: Collection[str]) -> dict[str, Path]:
    """Read ``--init-from``: ``PACK`` for a run of one task (its name is empty), ``NAME=PACK`` for several.

    Raises:
        UsageError: a name that is no task's, or several packs for one.
    """
    found: dict[str, Path] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not names:
            name, path = "", text
        elif not equals or name not in names:
            raise UsageError(
                f"`--init-from` {text!r}: with several tasks give NAME=PACK, NAME being one of {', '.join(names)}"
            )
        if name in found:
            raise UsageError(f"`--init-from` gives {f'task `{name}`' if name else 'the run'} two packs; give one")
        if not path:
            raise UsageError(f"`--init-from` {text!r} names no pack; give the folder of one")
        found[name] = Path(path)
    return found
