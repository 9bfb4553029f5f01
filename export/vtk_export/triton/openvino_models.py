"""Makes models for OpenVINO: IR files in our Python back-end, or for the server's OpenVINO back-end.

Both run the files of `vtk export openvino`, which are verified here, in Python. The config for the server's own
OpenVINO back-end follows its README and source, that for OpenVINO Model Server its documentation; neither was run.
"""

from pathlib import Path
from typing import Any

from vtk import console
from vtk.card import Card
from vtk.evaluation.abstention import with_threshold
from vtk.formats import write_json
from vtk.runtime.source import Source
from vtk.runtime.weight_digests import file_digest
from vtk_export.graph.unknown import UNKNOWN
from vtk_export.openvino.export import OpenvinoResult, export_openvino
from vtk_export.readme import README
from vtk_export.tasks.index import temperature_entry
from vtk_export.tensor_names import check_names
from vtk_export.triton.config import TritonCommand
from vtk_export.triton.files import write_code
from vtk_export.triton.order import ModelContent, Order, image_dims, say_notes
from vtk_export.triton.pbtxt import Slot, build
from vtk_export.triton.publish import MODEL_SERVER, Draft
from vtk_export.triton.served_by import Server, serve_openvino
from vtk_export.triton.task_models import parameters_of, slots_of

FILE = "model.xml"
_MOUNTED = "/models"
"""The repository in a container, as in the command lines that are printed."""


def fill_openvino(draft: Draft, order: Order) -> ModelContent:
    """Export sources to IR for our Python back-end: each task has a file, with a copy of all its weights.

    Raises:
        UsageError: a source or option that the exporter does not take.
        UnavailableError: OpenVINO is not installed, or bf16 was requested on a processor without it.
        VerificationError: a file's outputs are not PyTorch's, in fp32 or in the precision that is served.
    """
    config = order.config
    draft.at.mkdir()
    cards: dict[str, Card] = {}
    entries: dict[str, Any] = {}
    found: dict[str, object] = {}
    precision = ""
    for name in order.named:
        source = say_notes(order.open(name))
        # a name of ours: that of a task may be any text
        folder = draft.at / str(len(cards))
        result = _export(source, folder, config, order.folders.get(name), show=order.show, softmax=False)
        (folder / README).unlink()
        spec, precision = source.card.input, result.precision
        cards[name], found[name] = source.card, _results(result)
        entries[name] = {
            "number": len(entries), "file": f"{folder.name}/{FILE}", "card": f"{folder.name}/model.json",
            "classes": list(source.card.classes), "in_chans": spec.in_chans, "height": spec.height, "width": spec.width,
            **temperature_entry(source.card),
        }  # fmt: skip
    files = sorted(path for path in draft.at.rglob("model.*") if path.suffix in (".xml", ".bin"))
    digests = {path.relative_to(draft.at).as_posix(): file_digest(path) for path in files}
    write_json(draft.at / "tasks.json", {"format": 1, "tasks": entries, "sha256": digests})
    write_code(draft.at, "openvino")
    inputs, outputs = slots_of(cards, max(len(card.classes) for card in cards.values()), config)
    message = build(order.name, config, inputs, outputs, parameters={**parameters_of(config), "precision": precision},
                    warm=image_dims(cards), part_of=order.part_of, names=config.names)  # fmt: skip
    return ModelContent(message, cards, inputs, outputs, serve_openvino(config.runtime), {"openvino": found})


def fill_graph(draft: Draft, order: Order) -> ModelContent:
    """Export one source to IR for the server's OpenVINO back-end, with a config for OpenVINO Model Server beside it.

    The back-end fixes the batch at ``max_batch_size`` where that is not 0, and refuses or pads smaller calls; so it is
    0, the batch is an open axis, and each request is a call.

    Raises: what `fill_openvino` raises.
    """
    config = order.config
    (task,) = order.named
    source = say_notes(order.open(task))
    named: dict[str, Any] = {"input_name": config.input_name, "output_name": config.output_name,
                             "threshold": config.threshold, "risk": config.risk}  # fmt: skip
    result = _export(source, draft.at, config, order.folders.get(task), show=order.show, softmax=config.softmax,
                     with_preproc=order.in_graph, **named)  # fmt: skip
    (draft.at / README).unlink()
    spec, batch = source.card.input, config.static_batch or -1
    size: tuple[int, ...] = (-1, -1, 3) if order.in_graph else (spec.in_chans, *spec.size)
    image, answer = "images" if order.in_graph else "pixel_values", "probabilities" if config.softmax else "logits"
    judged = (UNKNOWN,) if config.threshold else ()
    names = check_names(config.names, (image,), (answer, *judged))
    kind = "TYPE_UINT8" if order.in_graph else "TYPE_FP32"
    inputs = [Slot(names.get(image, image), kind, (batch, *size))]
    outputs = [Slot(names.get(answer, answer), "TYPE_FP32", (batch, len(source.card.classes)))]
    outputs += [Slot(names.get(name, name), "TYPE_BOOL", (batch,)) for name in judged]
    threads = {} if config.server_threads is None else {"INFERENCE_NUM_THREADS": str(config.server_threads)}
    bf16 = {"HINT_BF16": "YES"} if result.precision == "bf16" else {}
    parameters = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": str(config.instances), **threads, **bf16}
    sides = (spec.height, spec.width, 3) if order.in_graph else size
    message = build(order.name, config, inputs, outputs, batched=False, parameters=parameters,
                    warm=(config.static_batch or 1, *sides), part_of=order.part_of, names=names)  # fmt: skip
    write_json(draft.folder / MODEL_SERVER, model_server_config(order.name, config, result.precision))
    console.warn(f"{order.name}: the file was run with OpenVINO in Python; the configs for the server's OpenVINO "
                 "back-end and for OpenVINO Model Server were not run")  # fmt: skip
    card = with_threshold(source.card, config.threshold, config.risk, source.name)
    return ModelContent(message, {task: card}, inputs, outputs, Server(serve_openvino(config.runtime).release),
                        {"openvino": {task: _results(result)}})  # fmt: skip


def model_server_config(name: str, config: TritonCommand, precision: str) -> dict[str, Any]:
    """Return the ``--config_path`` file of OpenVINO Model Server for a model of a repository that is mounted."""
    threads = {} if config.server_threads is None else {"INFERENCE_NUM_THREADS": str(config.server_threads)}
    settings = {
        "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": str(config.instances),
        "INFERENCE_PRECISION_HINT": {"fp32": "f32"}.get(precision, precision), **threads,
    }  # fmt: skip
    model = {"name": name, "base_path": f"{_MOUNTED}/{name}", "target_device": "CPU", "nireq": config.instances,
             "plugin_config": settings}  # fmt: skip
    return {"model_config_list": [{"config": model}]}


def _export(
    source: Source, out: Path, config: TritonCommand, data: Path | None, *, show: bool, **options: Any
) -> OpenvinoResult:
    return export_openvino(source, config.openvino_config(out, data, **options), show=show)


def _results(result: OpenvinoResult) -> dict[str, object]:
    names = ("precision", "verified", "facts", "outputs", "size_bytes", "fused")
    return {name: value for name, value in result.to_dict().items() if name in names}
