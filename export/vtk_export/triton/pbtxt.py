"""Builds ``config.pbtxt`` as the server's own protobuf message.

Nothing is left for the server to complete, so it also loads with ``--disable-auto-complete-config``.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx
from google.protobuf import text_format  # type: ignore[import-untyped]

from vtk import __version__
from vtk.errors import UsageError, VerificationError
from vtk.readers import reading
from vtk_export.triton.config import TritonCommand

CONFIG, LABELS, WARMUP_TASK, PLAN = "config.pbtxt", "labels.txt", "task", "model.plan"
MARK = "vtk"
"""Parameter by which a model folder is known to be an export's; servers ignore parameters that they do not know."""

NAMES = "names"
"""Parameter with the names that were given, JSON, by the toolkit's own: models in Python read it, and later exports."""

PART = "part_of"
"""Parameter of a step of an ensemble, with the ensemble's name."""

USUAL = 8
"""Images of a call that a TensorRT engine is tuned for."""

TYPES = {"FLOAT": "TYPE_FP32", "FLOAT16": "TYPE_FP16", "BFLOAT16": "TYPE_BF16", "UINT8": "TYPE_UINT8",
         "INT32": "TYPE_INT32", "INT8": "TYPE_INT8", "UINT16": "TYPE_UINT16", "INT16": "TYPE_INT16",
         "UINT32": "TYPE_UINT32", "DOUBLE": "TYPE_FP64", "BOOL": "TYPE_BOOL"}  # fmt: skip
"""ONNX's names of types to the server's."""

CLASSIFIED = frozenset({"TYPE_FP32", "TYPE_FP64", *(f"TYPE_{u}INT{n}" for u in ("", "U") for n in (8, 16, 32, 64))})
"""Types of which the server's classification extension finds the largest numbers (src/classification.cc of the server):
half types are refused there."""


@dataclass(frozen=True)
class Slot:
    """An input or output.

    Attributes:
        name: of the tensor.
        type: the server's name of it, such as ``TYPE_FP32``.
        dims: without the batch where the server batches, else with it; -1 for any.
        labels: whether the label file is of it.
        scalar: the model has one number an image, and clients send (1,), since a config's dims are never empty.
    """

    name: str
    type: str
    dims: tuple[int, ...]
    labels: bool = False
    scalar: bool = False


def add_output(message: Any, slot: Slot) -> None:
    """Add an output; the label file is named where the server can classify.

    It takes the numbers of one image apart by the batch that it made; where it makes none, all images' are one list.
    """
    classified = slot.labels and slot.type in CLASSIFIED and message.max_batch_size > 0
    message.output.add(name=slot.name, data_type=messages().DataType.Value(slot.type), dims=slot.dims,
                    label_filename=LABELS if classified else "")  # fmt: skip
    if slot.scalar:
        message.output[-1].reshape.SetInParent()


def messages() -> Any:
    """Return the module of the server's protobuf messages, which takes a second to import."""
    from tritonclient.grpc import model_config_pb2  # type: ignore[import-untyped]

    return model_config_pb2


def graph_slots(path: Path, *, labels: str | None, free: Sequence[str] = ()) -> tuple[list[Slot], list[Slot], bool]:
    """Read inputs and outputs of an ONNX file.

    Args:
        path: the file.
        labels: the output that the label file is of.
        free: tensors that may have other symbolic axes than the first; they are -1 in the dims.

    Returns:
        Inputs, outputs, and whether the batch is symbolic: its axis is then left out of the dims.

    Raises:
        VerificationError: a type that the server does not know, or another symbolic axis.
    """
    graph = onnx.load(path, load_external_data=False).graph
    shapes = {v.name: [d.dim_value if d.HasField("dim_value") else None for d in v.type.tensor_type.shape.dim]
              for v in (*graph.input, *graph.output)}  # fmt: skip
    batched = all(shape and shape[0] is None for shape in shapes.values())

    def slot(value: Any) -> Slot:
        kind = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)
        dims = shapes[value.name][1:] if batched else shapes[value.name]
        if kind not in TYPES or (None in dims and value.name not in free):
            raise VerificationError(
                f"{path.name}: `{value.name}` has type {kind} and shape {shapes[value.name]}, which no config can "
                "describe"
            )
        sides = tuple(-1 if side is None else side for side in dims)
        return Slot(value.name, TYPES[kind], sides or (1,), labels=value.name == labels, scalar=not sides)

    return [slot(v) for v in graph.input], [slot(v) for v in graph.output], batched


def task_slots(
    sizes: Sequence[tuple[int, int, int]], width: int | None, *, softmax: bool = False
) -> tuple[list[Slot], list[Slot]]:
    """Return inputs and outputs of a model of several tasks, batched.

    Args:
        sizes: (channels, height, width) of each task's images; axes in which tasks differ are free.
        width: classes of the task with the most; None where tasks may come later.
        softmax: whether it gives `probabilities` in place of `logits`.
    """
    dims = tuple(axis[0] if len(set(axis)) == 1 else -1 for axis in zip(*sizes, strict=True))
    inputs = [Slot("pixel_values", "TYPE_FP32", dims), Slot("task", "TYPE_STRING", (1,))]
    first = "probabilities" if softmax else "logits"
    outputs = [Slot(first, "TYPE_FP32", (width or -1,)), Slot("label", "TYPE_STRING", (1,)),
               Slot("score", "TYPE_FP32", (1,))]  # fmt: skip
    return inputs, outputs


def build(
    name: str,
    config: TritonCommand,
    inputs: Sequence[Slot],
    outputs: Sequence[Slot],
    *,
    batched: bool = True,
    parameters: Mapping[str, str] | None = None,
    warm: tuple[int, ...] = (),
    part_of: str = "",
    preferred: Sequence[int] = (),
    digest: str = "",
    names: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """Build a ``ModelConfig``.

    Args:
        name: of the model, from `check_name`.
        config: options.
        inputs: in any order.
        outputs: in any order.
        batched: the server may join requests; else every dim is given and ``max_batch_size`` is 0.
        parameters: for the back-end.
        warm: dims of the images that warm-up requests have, where those of the input are free.
        part_of: the ensemble that it is a step of.
        preferred: batch sizes that an engine was tuned for.
        digest: of the ONNX file and its weights, by which engines that the server builds are kept.
        names: of those inputs and outputs whose names were given, by the toolkit's own.
    """
    pb = messages()
    most = config.max_batch_size if batched else 0
    message = pb.ModelConfig(name=name, max_batch_size=most)
    if config.engine is not None:
        message.platform, message.backend, message.default_model_filename = "tensorrt_plan", "tensorrt", PLAN
    elif config.server == "openvino":
        message.backend, message.default_model_filename = "openvino", "model.xml"
    elif config.server in ("onnxruntime", "tensorrt"):
        message.backend, message.default_model_filename = "onnxruntime", "model.onnx"
    else:
        message.backend = "python"
    message.version_policy.latest.num_versions = 1
    for slot in inputs:
        message.input.add(name=slot.name, data_type=pb.DataType.Value(slot.type), dims=slot.dims)
        if slot.scalar:
            message.input[-1].reshape.SetInParent()
    for slot in outputs:
        add_output(message, slot)
    if most > 1:
        # no preferred sizes: a graph of any batch size gains nothing from waiting for a certain one
        message.dynamic_batching.max_queue_delay_microseconds = config.max_queue_delay_us
        message.dynamic_batching.preferred_batch_size.extend(size for size in preferred if size <= most)
    if config.server == "tensorrt" and config.engine is None:
        _accelerate(message, config, inputs, batched=batched, digest=digest)
    kinds = {"auto": "KIND_AUTO", "cpu": "KIND_CPU", "gpu": "KIND_GPU"}
    kind = {"python": "cpu", "openvino": "cpu", "tensorrt": "gpu"}.get(config.server, config.server_device)
    message.instance_group.add(kind=pb.ModelInstanceGroup.Kind.Value(kinds[kind]), count=config.instances)
    part = {PART: part_of} if part_of else {}
    named = {NAMES: json.dumps(dict(names))} if names else {}
    for key, value in {MARK: __version__, **part, **named, **(parameters or {})}.items():
        message.parameters[key].string_value = value
    if config.warmup:
        for batch in sorted({1, most or 1}):
            _warm(pb, message.model_warmup.add(name=f"batch {batch}", batch_size=batch), inputs, warm)
    return message


def _accelerate(message: Any, config: TritonCommand, inputs: Sequence[Slot], *, batched: bool, digest: str) -> None:
    """Configure ONNX Runtime's TensorRT accelerator for the batches of the server.

    Its name for a built engine has the graph's file name and structure in it, not the weights: each content has a
    folder and a prefix of its own, or a model that was trained again would get the engine of the old one.
    """
    engine = message.optimization.execution_accelerators.gpu_execution_accelerator.add(name="tensorrt").parameters
    engine["precision_mode"] = "FP16" if config.dtype == "fp16" else "FP32"
    engine["trt_layer_norm_fp32_fallback"] = "1"
    if batched:
        usual = min(USUAL, config.max_batch_size)
        for name, batch in (("min", 1), ("opt", usual), ("max", config.max_batch_size)):
            if odd := [slot.name for slot in inputs if ":" in slot.name]:
                raise UsageError(
                    f"`--input-name` {odd[0]}: the accelerator's list of shapes divides names at `:`; give one without"
                )
            shapes = (f"{slot.name}:{'x'.join(map(str, (batch, *slot.dims)))}" for slot in inputs)
            engine[f"trt_profile_{name}_shapes"] = ",".join(shapes)
        if config.max_batch_size > 1:  # engines are quickest at the sizes that they were tuned for
            message.dynamic_batching.preferred_batch_size.extend(sorted({usual, config.max_batch_size}))
    key = hashlib.sha256("\n".join([digest, *(f"{k}={engine[k]}" for k in sorted(engine))]).encode()).hexdigest()[:16]
    # not beside the model, which a polling server would take for a change; ONNX Runtime makes one folder, not two
    folder = f"/tmp/vtk-engines-{key}" if config.engine_cache is None else f"{config.engine_cache.rstrip('/')}/{key}"
    for what in ("engine", "timing"):
        engine[f"trt_{what}_cache_enable"], engine[f"trt_{what}_cache_path"] = "1", folder
    engine["trt_engine_cache_prefix"] = f"vtk-{key}"


def _warm(pb: Any, request: Any, inputs: Sequence[Slot], warm: tuple[int, ...]) -> None:
    for slot in inputs:
        entry = request.inputs[slot.name]
        entry.data_type = pb.DataType.Value(slot.type)
        entry.dims.extend(warm if -1 in slot.dims else slot.dims)
        if slot.type == "TYPE_STRING":
            entry.input_data_file = WARMUP_TASK  # an empty name is no task
        else:
            entry.zero_data = True


def names_in(message: Any) -> dict[str, str]:
    """Return the names that a config's inputs and outputs were given, by the toolkit's own; none of a damaged one."""
    if NAMES not in message.parameters:
        return {}
    with contextlib.suppress(ValueError):
        found = json.loads(message.parameters[NAMES].string_value)
        if isinstance(found, dict) and all(isinstance(name, str) for name in found.values()):
            return found
    return {}


def renamed(slots: Sequence[Slot], names: Mapping[str, str]) -> list[Slot]:
    """Return inputs or outputs under the names that were given."""
    return [dataclasses.replace(slot, name=names.get(slot.name, slot.name)) for slot in slots]


def write_text(message: Any) -> str:
    """Print a config; a ``max_batch_size`` of 0 too, which protobuf leaves out and a strict server asks for."""
    text: str = text_format.MessageToString(message, as_utf8=True)
    if not message.max_batch_size:
        text += "max_batch_size: 0\n"
    assert read_text(text) == message
    return text


def read_text(text: str, where: str = CONFIG) -> Any:
    """Parse a config.

    Raises:
        DataError: it is none; ``where`` names the file.
    """
    with reading(where, "is no config of a server's model", "was it edited?"):
        return text_format.Parse(text, messages().ModelConfig())
