"""Statistics of Λ, the scales of Context Broadcasting, by layer (Hyeon-Woo et al. 2023, Figure 8)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vtk.analysis.measures.results import MeasureResult
from vtk.analysis.probes.depth_points import block_modules
from vtk.errors import UsageError
from vtk.models.transforms.context_broadcast import ContextBroadcast


@dataclass(frozen=True)
class LayerScales:
    """Λ of one layer. CB_S computes x + Λ ⊙ mean(x), so that 0 broadcasts nothing; plain CB uses ½ and ½ instead.

    Attributes:
        name: of the module with Λ.
        block: number of its block in the model, from 1.
        where: ``mlp`` or ``msa``, the sublayer.
        placement: ``front``, ``mid`` or ``end`` of it.
        mean: over channels.
        deviation: standard deviation over channels, of the population.
        negative: share of channels with λ < 0, which subtract the mean.
        ratio: |λ|₀.₁ / |λ|₀.₉, the 10 % quantile of the magnitudes over the 90 % one: 1 if all are equal; None if
            the latter is 0.
        channels: length of Λ.
    """

    name: str
    block: int
    where: str
    placement: str
    mean: float
    deviation: float
    negative: float
    ratio: float | None
    channels: int


@dataclass(frozen=True)
class ContextScales(MeasureResult):
    """Λ of every layer with scaled Context Broadcasting.

    Attributes:
        layers: in order of depth.
    """

    layers: tuple[LayerScales, ...]


@torch.no_grad()
def context_scales(model: nn.Module) -> ContextScales:
    """Return statistics of Λ by layer; needs no images.

    The paper writes the ratio as |λ₀.₁| / |λ₀.₉| and says that it shows how similar high and low values of the scaling
    weights are; quantiles are taken of their magnitudes here, since those of the values may have any sign.

    Raises:
        UsageError: the model has no Context Broadcasting, or only plain one, which has no Λ.
    """
    kind = type(model).__name__
    broadcasts = {name: module for name, module in model.named_modules() if isinstance(module, ContextBroadcast)}
    if not broadcasts:
        raise UsageError(
            f"{kind} has no Context Broadcasting; `vtk finetune … --cb-scale` adds it to a ViT, PiT or MLP-Mixer"
        )
    if all(module.scale is None for module in broadcasts.values()):
        raise UsageError(
            f"{kind} has plain Context Broadcasting, whose weight is ½ everywhere; train with --cb-scale for a learned "
            "Λ"
        )
    blocks = list(block_modules(model))
    layers: list[LayerScales] = []
    for name, module in broadcasts.items():
        if module.scale is not None:
            block = next((i for i, b in enumerate(blocks, start=1) if name.startswith(f"{b}.")), len(layers) + 1)
            layers.append(statistics(name, block, model.get_submodule(name.rpartition(".")[0]), module.scale))
    return ContextScales(tuple(layers))


def statistics(name: str, block: int, parent: nn.Module, scale: Tensor) -> LayerScales:
    """Return the statistics of one Λ (C) of a module ``parent`` in a block."""
    values = scale.detach().double().cpu()
    low, high = torch.quantile(values.abs(), torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist()
    return LayerScales(
        name=name,
        block=block,
        where="msa" if name.endswith((".attn.cb", ".cb_msa")) else "mlp",
        placement=str(getattr(parent, "cb_placement", "end")),  # of a parallel block's sum it is always the end
        mean=float(values.mean()),
        deviation=float(values.std(correction=0)),
        negative=float((values < 0).double().mean()),
        ratio=low / high if high else None,
        channels=len(values),
    )
