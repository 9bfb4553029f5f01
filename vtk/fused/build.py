"""`fuse`: converts a timm Vision Transformer into a `FusedViT` with the same logits from fewer, wider kernels."""

from collections import OrderedDict
from typing import Any

import torch

from vtk.errors import UsageError
from vtk.fused.families.registry import reader_of
from vtk.fused.mlp_stage import MlpStage
from vtk.fused.model import FusedViT
from vtk.fused.stages import Stage
from vtk.models.devices import check_dtype


def fuse(
    model: Any,
    dtype: torch.dtype | None = None,
    *,
    keep_source: bool = True,
    ln_folded: bool | None = None,
    graphs: bool = True,
) -> FusedViT:
    """Fold and merge a timm Vision Transformer for inference; the model itself is not changed.

    LayerNorm's affine part and centring, the softmax scale, LayerScale and BatchNorm of stems go into linear layers; P
    parallel branches become one; with class-token pooling the last block computes only what the class token needs. All
    exact.

    Args:
        model: of a family that `vtk.fused.families` reads, on any device: timm's VisionTransformer with `Block`,
            `ParallelThingsBlock` or `ParallelScalingBlock`, also with Context Broadcasting or a distillation token;
            Eva, Beit, VisionTransformerRelPos, or NaFlexVit for images of one size a batch.
        dtype: of the result, by default the model's. Folding is done in fp32 (fp64 for an fp64 model), cast once.
        keep_source: keep the model's own tensors alive for `FusedViT.source_state_dict`.
        ln_folded: on CUDA in fp16 and bf16: True for the form of 5 kernels a block, in which products apply the norms;
            False for that of 7, in which kernels do; None for the quicker one where it was measured, else 7. By True
            a stage that needs normalised tokens (Context Broadcasting of them) gets them from a kernel.
        graphs: on CUDA, replay each batch size as one CUDA graph; False to start kernel by kernel.

    Raises:
        UsageError: a part that is not known, by name, with what to do; a ``dtype`` without arithmetic; or
            ``ln_folded=True`` where no stage can do without normalised tokens.
    """
    reader = reader_of(model)
    parameter = next(model.parameters())
    target = check_dtype(parameter.dtype if dtype is None else dtype)
    before = 0
    with torch.no_grad():
        like = torch.empty(0, dtype=torch.promote_types(parameter.dtype, torch.float32), device=parameter.device)
        stages: list[Stage] = []
        for i in range(len(model.blocks)):
            before = len(stages)
            stages += reader.stages(model, i, like)
        head, rotary = reader.head(model, like), reader.rotary(model, like)
        last = stages[before:]
        prunes = head.queries is not None and not any(stage.end or stage.front or _mid(stage) for stage in last)
        embedding = reader.embedding(model, like)
        fused = FusedViT(embedding, stages, head, pruned=before if prunes else -1, rotary=rotary)
        fused.to(target)
    if ln_folded and not any(stage.reads_raw for stage in stages[1:]):
        raise UsageError(
            "`ln_folded` is True and nothing of this model can do without normalised tokens: after the first, every "
            "norm has Context Broadcasting behind it; leave it out"
        )
    fused.ln_folded, fused.graphs = ln_folded, graphs
    if keep_source:
        fused._source = OrderedDict(model.state_dict())
    return fused


def _mid(stage: Stage) -> bool:
    return isinstance(stage, MlpStage) and stage.mid
