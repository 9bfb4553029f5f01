"""Publishes an ensemble: a preprocessing model, a classifier, and the model that chains them for clients.

The steps are published before the ensemble that refers to them. While a polling server replaces them one after the
other, requests may meet a new step and an old one; so a task's preprocessing must not change.
"""

import contextlib
import dataclasses
import json
from typing import Any

from vtk import console
from vtk.card import InputSpec
from vtk.errors import UsageError
from vtk.formats import read_json, write_json
from vtk_export.graph.preproc import check_preproc
from vtk_export.triton.ensemble_config import build_ensemble, build_preprocess, raw_slot, step_names
from vtk_export.triton.factor_models import takes_factors
from vtk_export.triton.files import same_code, write_code, write_model_files
from vtk_export.triton.models import fill
from vtk_export.triton.order import ModelContent, Order
from vtk_export.triton.pbtxt import CONFIG, names_in, renamed, write_text
from vtk_export.triton.preproc_drift import measure_served
from vtk_export.triton.publish import Draft, draft
from vtk_export.triton.update import updated_order

INDEX, STEPS = "tasks.json", "steps.json"


def wants_ensemble(order: Order) -> bool:
    """Return whether preprocessing is a separate step; print why if it could not be in the graph.

    Raises:
        UsageError: the ensemble cannot be either.
    """
    config = order.config
    if not config.with_preproc or config.ensemble is False or config.server == "openvino":
        return False
    if config.server == "onnxruntime" and config.ensemble is None:
        try:
            check_preproc(order.open(next(iter(order.named))).card.input)
            return False
        except UsageError as error:
            console.say(f"preprocessing runs in an ensemble: {str(error).partition('; ')[0]}")
    if config.static_batch is not None:
        raise UsageError("`--static-batch` fixes the size of a call, and an ensemble takes requests of any size; leave "
                         "it out")  # fmt: skip
    if config.dtype == "bf16" and config.server == "onnxruntime" and not config.keep_io_types:
        raise UsageError("`--with-preproc` prepares images in numpy, which has no bf16; add --keep-io-types")
    return True


def publish_ensemble(order: Order) -> tuple[Draft, ModelContent, dict[str, Draft]]:
    """Make the three models, and publish them when all are verified.

    Args:
        order: of the ensemble, by its name.

    Returns:
        The ensemble's draft, the classifier's content, and the drafts of both steps by their names.

    Raises:
        UsageError: images of a task would be prepared in another way than before.
        DataError: the repository cannot be written, or holds something else under one of the names.
        VtkError: what `fill` raises.
    """
    prepare, classify = step_names(order.name)
    config = order.config
    with contextlib.ExitStack() as stack:
        # what is opened last is published first
        whole = stack.enter_context(draft(config.out, order.name))
        inner = stack.enter_context(draft(config.out, classify, order.name))
        before = stack.enter_context(draft(config.out, prepare, order.name))
        order = updated_order(order, inner, whole)
        earlier = _earlier(before, order)
        # the steps keep the toolkit's names, and the ensemble gives its own tensors others
        names, plain = order.config.names, dataclasses.replace(order.config, input_name=(), output_name=())
        content = fill(inner, dataclasses.replace(order, name=classify, part_of=order.name, config=plain))
        write_model_files(inner.folder, content.message, content.cards, [slot.name for slot in content.outputs])
        first = _write_preprocess(before, order, content, prepare, earlier)
        drift = measure_served(
            content.cards, lambda task: order.open(task).model(), folders=order.folders, split=config.split,
            seed=config.seed,
        )  # fmt: skip
        content.found["preprocessing_drift"] = dataclasses.asdict(drift)
        message = build_ensemble(order.name, first, content.message, content.outputs, names)
        versions = {prepare: before.version, classify: inner.version}
        whole.at.mkdir()
        write_json(whole.at / STEPS, {"format": 1, "steps": versions, "drift": dataclasses.asdict(drift)})
        outputs = [slot.name for slot in renamed(content.outputs, names_in(message))]
        write_model_files(whole.folder, message, content.cards, outputs)
        if inner.reused and whole.old is not None and whole.old.config == message:
            whole.reuse()
    return whole, content, {prepare: before, classify: inner}


def _earlier(step: Draft, order: Order) -> dict[str, Any]:
    """Return the preprocessing of the existing step by task; that of the same tasks must not change.

    Raises:
        UsageError: names a task that would be prepared in another way.
    """
    if step.old is None or not step.old.versions:
        return {}
    found = read_json(step.old.path / str(step.old.versions[-1]) / INDEX)
    earlier: dict[str, Any] = found.get("tasks", {}) if isinstance(found, dict) else {}
    specs = {task: _plain(order.open(task).card.input) for task in order.named}
    if order.config.server not in ("python", "vtk"):  # there is one way, whatever the source is called
        earlier = dict(zip(specs, earlier.values(), strict=False))
    if changed := [task for task, spec in specs.items() if earlier.get(task, spec) != spec]:
        raise UsageError(
            f"images of `{changed[0]}` would be preprocessed differently than before, and a polling server would for a "
            f"moment pass them to the old model: give another --name, or stop the server and delete "
            f"{step.old.path}"
        )
    return earlier


def _write_preprocess(step: Draft, order: Order, content: ModelContent, name: str, earlier: dict[str, Any]) -> Any:
    """Write the preprocessing step; keep an earlier one that does the same."""
    specs = {task: _plain(card.input) for task, card in content.cards.items()}
    image = next(slot for slot in content.inputs if slot.name == "pixel_values")
    tasks = any(slot.name == "task" for slot in content.inputs)
    raw = raw_slot([card.input for card in content.cards.values()])
    message = build_preprocess(name, order.name, order.config, image, raw, tasks=tasks)
    step.at.mkdir()
    write_json(step.at / INDEX, {"format": 1, "tasks": specs})
    write_code(step.at, "preprocess")
    (step.folder / CONFIG).write_text(write_text(message), encoding="utf-8", newline="\n")
    if step.old is None or not step.old.versions:
        return message
    last = step.old.path / str(step.old.versions[-1])
    if step.old.config == message:
        if same_code(last, "preprocess") and earlier == specs:
            step.keep()
        elif order.config.server == "vtk" or takes_factors(order):
            step.reuse()  # follows its index, as the bank does
    return message


def _plain(spec: InputSpec) -> dict[str, Any]:
    """Return a spec as JSON gives it back, with lists for tuples."""
    found: dict[str, Any] = json.loads(json.dumps(spec.to_dict()))
    return found
