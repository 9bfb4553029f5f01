"""Makes models of one source: an ONNX graph in ONNX Runtime, with or without TensorRT, or a built engine."""

import dataclasses
from pathlib import Path

from vtk import console
from vtk.evaluation.abstention import with_threshold
from vtk.runtime.weight_digests import content_digest
from vtk_export.onnx.config import derive
from vtk_export.onnx.export import export_onnx
from vtk_export.tensorrt.config import TensorrtConfig
from vtk_export.tensorrt.export import export_tensorrt
from vtk_export.triton.config import TritonCommand
from vtk_export.triton.engine import check_engine, copy_engine, read_engine
from vtk_export.triton.order import ModelContent, Order, gate_results, say_notes, take_latency
from vtk_export.triton.pbtxt import USUAL, build, graph_slots
from vtk_export.triton.publish import Draft
from vtk_export.triton.served_by import serve_engine, serve_graph


def fill_graph(draft: Draft, order: Order) -> ModelContent:
    """Export one source to ONNX, and write the config for ONNX Runtime, with or without TensorRT."""
    config = order.config
    (task,) = order.named
    source = say_notes(order.open(task))
    given = {"input_name": config.input_name, "output_name": config.output_name}
    options = derive(config, **{
        **config.onnx_options(draft.at, order.folders.get(task), with_preproc=order.in_graph), **given,
    })  # fmt: skip
    if config.server == "tensorrt":
        export_tensorrt(source, _tensorrt_config(draft.at, config, order.folders.get(task)), show=order.show)
        found: dict[str, object] = {}
    else:
        found = gate_results(export_onnx(source, options, show=order.show))
    labels = "probabilities" if options.softmax else "logits"
    inputs, outputs, batched = graph_slots(
        draft.at / "model.onnx", labels=options.names.get(labels, labels),
        free=(options.names.get("images", "images"),) if order.in_graph else (),
    )  # fmt: skip
    threads = {} if config.server_threads is None else {"intra_op_thread_count": str(config.server_threads)}
    spec = source.card.input
    size = (spec.height, spec.width, 3) if order.in_graph else (spec.in_chans, *spec.size)
    warm = size if batched else (config.static_batch or 1, *size)
    served = serve_graph(draft.at / "model.onnx", config.runtime, tensorrt=config.server == "tensorrt")
    digest = content_digest(draft.at / "model.onnx") if config.server == "tensorrt" else ""
    message = build(order.name, config, inputs, outputs, batched=batched, parameters=threads, warm=warm,
                    part_of=order.part_of, digest=digest, names=options.names)  # fmt: skip
    code = take_latency(order, draft.at / "model.onnx", source, found)
    card = with_threshold(source.card, config.threshold, config.risk, source.name)
    return ModelContent(message, {task: card}, inputs, outputs, served, found, code)


def fill_engine(draft: Draft, order: Order) -> ModelContent:
    """Check a built engine against its source, and copy it."""
    config = order.config
    assert config.engine is not None
    (task,) = order.named
    source = say_notes(order.open(task))
    engine = read_engine(config.engine)
    served = serve_engine(str(engine.stamp.get("tensorrt", "")), config.runtime)
    check_engine(engine, source, config, order.folders.get(task), show=order.show)
    copy_engine(engine, draft.at)
    console.say(f"the engine is for {engine.built}; a server with another version or GPU refuses it")
    inputs, outputs = list(engine.inputs), list(engine.outputs)
    usual = sorted({min(size, config.max_batch_size) for size in engine.batches[1:]})
    preferred = usual if engine.batched and config.max_batch_size > 1 else []
    built = {key: str(value) for key, value in engine.stamp.items() if not key.endswith("_sha256")}
    message = build(order.name, config, inputs, outputs, batched=engine.batched, parameters=built,
                    part_of=order.part_of, preferred=preferred, names=engine.names)  # fmt: skip
    return ModelContent(message, {task: source.card}, inputs, outputs, served, {"engine": dict(engine.stamp)})


def _tensorrt_config(out: Path, config: TritonCommand, data: Path | None) -> TensorrtConfig:
    options = TensorrtConfig(
        out=out, opset=config.opset, static_batch=config.static_batch, data=data, split=config.split, fuse=config.fuse,
        dtype="fp16" if config.dtype == "fp16" else "fp32", keep_io_types=config.keep_io_types, images=config.images,
        seed=config.seed, threads=config.threads, target=config.target,
        input_name=config.input_name, output_name=config.output_name,
    )  # fmt: skip
    if config.static_batch is not None:
        return options
    return dataclasses.replace(options, opt=min(USUAL, config.max_batch_size), max=config.max_batch_size)
