"""Changes the tasks of a model that is in the repository already: some are added or replaced, some removed.

The others stay as they are. Which there are is read while no other export can write the model, so of two commands that
change different tasks none undoes the other.
"""

import dataclasses
from pathlib import Path

from vtk.errors import DataError, UsageError
from vtk.formats import read_json
from vtk_export.tasks.index import LAYOUT
from vtk_export.triton.bank_packs import INDEX
from vtk_export.triton.order import Order
from vtk_export.triton.pbtxt import names_in
from vtk_export.triton.publish import Draft


def updated_order(order: Order, draft: Draft, whole: Draft | None = None) -> Order:
    """Return the order for all tasks that the model is to have; without ``--update`` and ``--remove`` the order itself.

    Args:
        order: names the tasks that are new or replaced.
        draft: of the model, which nobody else may write now.
        whole: of the ensemble that it is a step of.

    Names of inputs and outputs stay those of the model, where none are given.

    Raises:
        UsageError: there is no such model or no such task, or the model's back-end takes no changes.
        DataError: what the model consists of cannot be read.
    """
    config = order.config
    if not config.changes:
        return order
    if draft.last is None:
        raise UsageError(f"{config.out} has no model {order.name} to update; leave --update and --remove out, or give "
                         "its --name")  # fmt: skip
    kept = _packs(draft.last, order.name)
    served = _served(draft.last)
    if config.server != served:
        raise UsageError(f"the model {order.name} is one of --backend {served}, not {config.server}; give --backend "
                         f"{served}, or export all tasks again without --update and --remove")  # fmt: skip
    if missing := [name for name in config.remove if name not in kept]:
        raise UsageError(f"`--remove` {missing[0]}: {order.name} has no such task; it has {_some(list(kept))}")
    if both := [name for name in config.remove if name in order.named]:
        raise UsageError(f"`--remove` {both[0]} is among the sources, too; a source replaces its task by itself")
    named = {name: order.named.get(name, path) for name, path in kept.items() if name not in config.remove}
    named |= order.named
    if not named:
        raise UsageError(
            f"`--remove` leaves no task of {order.name}; delete its folder in {config.out} to take it away"
        )
    earlier = (whole or draft).old
    if earlier is not None and not (config.input_name or config.output_name):
        kept_names = names_in(earlier.config)
        outputs = {entry.name for entry in earlier.config.output}
        given = [tuple(f"{t}={n}" for t, n in kept_names.items() if (n in outputs) is end) for end in (False, True)]
        config = dataclasses.replace(config, input_name=given[0], output_name=given[1])
    return dataclasses.replace(order, named=named, config=config)


def _packs(last: Path, model: str) -> dict[str, Path]:
    """Return the packs of a model's tasks, in its own folder."""
    found = read_json(last / INDEX)
    tasks = found.get("tasks") if isinstance(found, dict) else None
    if not isinstance(tasks, dict) or not all(isinstance(entry, dict) for entry in tasks.values()):
        raise DataError(f"{last / INDEX} lists no tasks; export all of them again, without --update and --remove")
    packs = {name: entry.get("pack") for name, entry in tasks.items()}
    if not all(isinstance(pack, str) for pack in packs.values()):
        raise UsageError(f"the model {model} has no packs of its own, from which it could be changed; export all tasks "
                         "again, without --update and --remove")  # fmt: skip
    return {name: last / str(pack) for name, pack in packs.items()}


def _served(last: Path) -> str:
    """Return the back-end of a version folder with packs, by its files: only a bank is without a graph."""
    if (last / LAYOUT).is_file():
        return "python"
    return "onnxruntime" if any(last.glob("*.onnx")) else "vtk"


def _some(names: list[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
