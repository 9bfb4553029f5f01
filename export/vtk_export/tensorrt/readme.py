"""Writes the README.md of a TensorRT export."""

from vtk.card import Card
from vtk.markdown import span
from vtk.packs.readme import card_sections
from vtk_export.readme import TENSORRT, input_facts, onnx_code, use_of


def tensorrt_page(card: Card, *, half: str, batch: int | None, version: str) -> str:
    """Return the page of a TensorRT folder: how to build the engine, and the same graph in ONNX Runtime.

    Args:
        card: of the model.
        half: ``fp16`` or ``bf16`` where inputs and outputs have that type, else "".
        batch: fixed batch size, None for the range in ``profile.json``.
        version: of TensorRT.
    """
    return (
        f"{TENSORRT}{span(card.model.name)}\n\n"
        f"`bash build.sh` or `python build_engine.py` builds `model.engine` from `model.onnx` with TensorRT {version} "
        "or newer. Run it on the target GPU: an engine is specific to one GPU and one TensorRT version. From Python, "
        "`build_engine.load_engine()` checks the engine's stamp and returns it. `profile.json` has the range of batch "
        "sizes; TensorRT refuses others. `bash compare.sh` compares the engine with ONNX Runtime.\n\n"
        f"{input_facts(card, False, half or 'fp32', batch, None)}\n\n"
        "Without TensorRT, with onnxruntime and Pillow installed, run these lines in this folder to load the same "
        f"graph; {use_of('logits')}:\n\n"
        f"{onnx_code(card, names=('logits',), half=half, batch=batch)}\n{card_sections(card)}"
    )
