"""Builds the configs of an ensemble and of its preprocessing step."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vtk import __version__
from vtk.card import InputSpec
from vtk.errors import UsageError
from vtk_export.graph.preproc import RAW_TYPES
from vtk_export.tensor_names import check_names
from vtk_export.triton.config import TritonCommand
from vtk_export.triton.config_checks import check_name
from vtk_export.triton.pbtxt import MARK, NAMES, PART, TYPES, Slot, add_output, messages, renamed

PREPROCESS, CLASSIFIER = "_preprocess", "_classifier"
"""Behind the ensemble's name, the names of its steps."""

_KINDS = ("TYPE_FP32", "TYPE_FP16")


def step_names(name: str) -> tuple[str, str]:
    """Return the names of the preprocessing step and of the classifier.

    Raises:
        UsageError: the ensemble's name is no good, or leaves no room for theirs.
    """
    return check_name(check_name(name) + PREPROCESS), check_name(name + CLASSIFIER)


def build_preprocess(name: str, whole: str, config: TritonCommand, image: Slot, raw: Slot, *, tasks: bool) -> Any:
    """Build the ``ModelConfig`` of the preprocessing step.

    Args:
        name: of the step.
        whole: of the ensemble.
        config: options.
        image: what the model takes.
        raw: what a request has where images are sent decoded.
        tasks: whether each image comes with the name of a task.

    Raises:
        UsageError: numpy lacks the type that the model takes.
    """
    if image.type not in _KINDS:
        raise UsageError(f"`--with-preproc` prepares images in numpy, which has no {image.type.removeprefix('TYPE_')}; "
                         "add --keep-io-types")  # fmt: skip
    pb = messages()
    message = pb.ModelConfig(name=name, backend="python", max_batch_size=config.max_batch_size)
    message.version_policy.latest.num_versions = 1
    message.input.add(name="encoded", data_type=pb.DataType.Value("TYPE_STRING"), dims=(1,), optional=True)
    message.input.add(name=raw.name, data_type=pb.DataType.Value(raw.type), dims=raw.dims, optional=True)
    for entry in message.input:  # a request has one of the two
        # requests are handed over one by one, so images of any sizes may share a call
        entry.allow_ragged_batch = True
    if tasks:
        message.input.add(name="task", data_type=pb.DataType.Value("TYPE_STRING"), dims=(1,))
    message.output.add(name=image.name, data_type=pb.DataType.Value(image.type), dims=image.dims)
    # what waits while a call is prepared is joined to the next; to wait for more is the model's part
    message.dynamic_batching.max_queue_delay_microseconds = 0
    message.instance_group.add(kind=pb.ModelInstanceGroup.Kind.Value("KIND_CPU"), count=1)
    parameters = {MARK: __version__, PART: whole, "pixel_type": image.type}
    if config.server_threads is not None:
        parameters["threads"] = str(config.server_threads)
    for key, value in parameters.items():
        message.parameters[key].string_value = value
    return message


def build_ensemble(name: str, preprocess: Any, model: Any, outputs: Sequence[Slot], names: Mapping[str, str]) -> Any:
    """Build the ``ModelConfig`` of the ensemble, which clients query.

    Args:
        name: of it.
        preprocess: the first step's message.
        model: the second step's message.
        outputs: of the model.
        names: that the ensemble's inputs and outputs are given, by the toolkit's own.

    Raises:
        UsageError: a name for what it does not have.
    """
    pb = messages()
    inside, ends = [entry.name for entry in preprocess.input], [slot.name for slot in outputs]
    names = check_names(names, inside, ends)
    tensors = {**{value: value for value in (*inside, *ends)}, **names}
    for value in preprocess.output:  # between the steps, where nobody names it
        taken = set(tensors.values())
        tensors[value.name] = next(n for n in (value.name, f"{value.name}_normalised") if n not in taken)
    message = pb.ModelConfig(name=name, platform="ensemble", max_batch_size=preprocess.max_batch_size)
    message.version_policy.latest.num_versions = 1
    for entry in preprocess.input:
        message.input.add().CopyFrom(entry)
        message.input[-1].ClearField("allow_ragged_batch")
        message.input[-1].name = tensors[entry.name]
    for slot in renamed(outputs, names):
        add_output(message, slot)
    for step in (preprocess, model):
        # the latest version, whichever it is: a step is replaced before the ensemble is
        entry = message.ensemble_scheduling.step.add(model_name=step.name, model_version=-1)
        for value in step.input:
            entry.input_map[value.name] = tensors[value.name]
        for value in step.output:
            entry.output_map[value.name] = tensors[value.name]
    message.parameters[MARK].string_value = __version__
    if names:
        message.parameters[NAMES].string_value = json.dumps(names)
    return message


def raw_slot(specs: Sequence[InputSpec]) -> Slot:
    """Return the input of decoded images: bytes, the type of the tasks' value ranges, or fp32 where these differ."""
    kinds = {spec.value_type for spec in specs} - {""}
    kind = TYPES[RAW_TYPES[kinds.pop() if kinds else ""]] if len(kinds) < 2 else "TYPE_FP32"
    channels = {3 if spec.in_chans == 1 else spec.in_chans for spec in specs}
    return Slot("images", kind, (-1, -1, channels.pop() if len(channels) == 1 else -1))
