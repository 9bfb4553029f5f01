"""Share of active neurons in the hidden layers (Chen et al. 2022, section 4.4 and Figure 2, right)."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from vtk.analysis.measures.results import LayerResults
from vtk.analysis.probes.activations import Hidden, Kind, watch_activations
from vtk.analysis.probes.batches import Batches, eval_mode, stream
from vtk.analysis.probes.depth_points import block_modules
from vtk.errors import UsageError
from vtk.models.transforms.extra_block import SublayerBlock


@dataclass(frozen=True)
class LayerNeurons:
    """Neurons of one hidden layer.

    Attributes:
        name: of the activation's module.
        block: number of its block, from 1.
        kind: ``MLP``, ``token MLP`` (MLP-Mixer) or ``conv``.
        function: class of the activation, such as GELU.
        neurons: how many there are; channels of a map.
        active: share of them above 0, mean over images and positions (of a token MLP, over images and channels).
        never: number of neurons above 0 at no position of any image.
        always: number of neurons above 0 at every position of every image, which are (nearly) linear.
    """

    name: str
    block: int
    kind: Kind
    function: str
    neurons: int
    active: float
    never: int
    always: int


@dataclass(frozen=True)
class ActiveNeurons(LayerResults[LayerNeurons]):
    """Neurons of all hidden layers.

    Attributes:
        unseen: blocks with an activation that could not be seen, and blocks without one.
    """

    unseen: tuple[str, ...]


@torch.no_grad()
def active_neurons(model: nn.Module, batches: Batches, *, max_images: int | None = None) -> ActiveNeurons:
    """Return how many neurons of every hidden layer have an activation above 0, the model in eval mode.

    Chen et al. (2022) count so because the derivative of GELU is much smaller below 0; there GELU and SiLU still let a
    little pass. Of a gated MLP (GluMlp, SwiGLU) the neuron's gate counts. Memory: 8 bytes a neuron.

    Args:
        model: a timm ViT (parallel branches too), MLP-Mixer, Swin, PiT, ResNet and others whose blocks hold modules of
            ReLU, GELU, SiLU or another activation that keeps the sign.
        batches: images, labels unused.
        max_images: use only the first ones.

    Raises:
        UsageError: the model has no recognised blocks, or no such activation in them.
        DataError: there are no images.
    """
    counts: dict[Hidden, Tensor] = {}
    places: dict[Hidden, int] = {}

    def see(hidden: Hidden, output: Tensor) -> None:
        above = (output > 0).flatten(0, -2).sum(dim=0)
        counts[hidden] = counts[hidden] + above if hidden in counts else above
        places[hidden] = places.get(hidden, 0) + output[..., 0].numel()

    images = 0
    with eval_mode(model), watch_activations(model, see) as functional:
        for batch, _ in stream(model, batches, max_images):
            model(batch)
            images += len(batch)
    blocks = block_modules(model)
    seen = {hidden.block for hidden in counts}
    without = {b for b, module in blocks.items() if isinstance(module, SublayerBlock) and module.leaf == "attn"}
    unseen = tuple(b for i, b in enumerate(blocks, start=1) if (i not in seen and b not in without) or b in functional)
    if not counts:
        why = "calls its activation as a function, which no hook sees" if unseen[0] in functional else (
            "has no module of ReLU, GELU, SiLU or the like"
        )  # fmt: skip
        raise UsageError(f"{type(model).__name__}: `{unseen[0]}` {why}; neurons are counted after such modules")
    layers = []
    for hidden, count in counts.items():
        of, total = places[hidden], count.double()
        layers.append(
            LayerNeurons(
                **asdict(hidden),
                neurons=len(count),
                active=float(total.mean()) / of,
                never=int((count == 0).sum()),
                always=int((count == of).sum()),
            )
        )
    return ActiveNeurons(tuple(layers), images, unseen)
