"""The inference model that `vtk.fused.fuse` makes: folded, merged blocks, as kernels, as torch or as CUDA graphs."""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk import console
from vtk.errors import UsageError
from vtk.fused.cache import last_level_cache
from vtk.fused.embed import Embedding, Head
from vtk.fused.graph_module import Graphed
from vtk.fused.norms import NormSpec, normalize
from vtk.fused.onednn_prepack import observed
from vtk.fused.residual import SummedBiases, adds_in_products, close_by_products, sums_of_biases
from vtk.fused.stage_input import Pair, RawTokens, Reading, close_with_stats
from vtk.fused.stages import AttentionStage, MlpStage, Plan, Stage, context_mean
from vtk_kernels._device import FEW_ROWS
from vtk_kernels._dispatch import HALF
from vtk_kernels._residual_kernel import counters_needed
from vtk_kernels.add_norm import add_norm
from vtk_kernels.choices import choose, device_name
from vtk_kernels.context_broadcast import context_broadcast
from vtk_kernels.linear_residual import linear_residual
from vtk_kernels.norm import norm as kernel_norm
from vtk_kernels.splitk_linear import default_splits, splitk_linear


class FusedViT(Graphed):
    """An inference model of folded, merged blocks.

    On CUDA it is replayed as one CUDA graph per batch size, in fp16 and bf16 of the Triton operations. Elsewhere it is
    plain torch. It holds no gradient and has no training mode.

    The operations have two forms. With norms of their own a block is 7 kernels: qkv, attention, output projection, add
    and norm, fc1 with GELU, fc2, add and norm. Folded it is 5: the norms' statistics come from the products that write
    the residual stream, their scale is applied by those that read it, and no kernel only normalises.

    Attributes:
        graphs: whether batches of up to 256 images are captured at their first call and replayed (CUDA only; the
            default). Eight shapes are kept, the least recently used one goes. Traced, transformed, with gradients,
            inside of another capture, with hooks of its parts, or where a capture fails, it runs kernel by kernel.
        ln_folded: which form runs on CUDA in fp16 and bf16: folded, not, or by None the one that
            `vtk_kernels.choose` names for the shape; that folds only where all stages after the first can. By True
            those that can are folded. Each form has graphs of its own.
        cache_bytes: the last-level cache the CPU's plan counts with.
        bias_sums: (stages, C), of the biases of each stage and all before it, for the form that leaves them out of the
            residual stream; in no state dict, and written anew where that form meets other biases (``bias.data.add_``
            escapes the counter that tells).
        summed: of which biases they are.
    """

    bias_sums: Tensor

    def __init__(self, embed: Embedding, stages: Sequence[Stage], head: Head, *, pruned: int) -> None:
        super().__init__()
        self.embed, self.stages, self.head = embed, nn.ModuleList(stages), head
        self.pruned = pruned
        ends = [m for stage in stages for m in stage.modules() if isinstance(m, AttentionStage | MlpStage)]
        self._ends = sorted({tuple(m.w_out.shape) for m in ends if hasattr(m, "w_out")})  # not those in fp8
        self.cache_bytes = last_level_cache()
        self._source: OrderedDict[str, Tensor] | None = None
        self.register_buffer("bias_sums", sums_of_biases(stages), persistent=False)
        self.summed = SummedBiases()
        self.register_load_state_dict_post_hook(_sum_again)
        self.eval()

    def compute(self, images: Tensor, plan: Plan | None = None) -> Tensor:
        """Run without a graph; ``plan`` by default is that of the device, the type and `ln_folded`."""
        if torch.is_autocast_enabled(images.device.type):  # the model's own type holds, for the residual stream too
            with torch.autocast(images.device.type, enabled=False):
                return self.compute(images, plan)
        images = self._cast(images)
        if plan is None:
            kernels = images.is_cuda and images.dtype in HALF and not torch.compiler.is_exporting()
            plan = Plan(kernels, device_name(images) if kernels else None, None)
        stages: list[Any] = list(self.stages)
        own, needed, table = plan.ln_folded is None, 0, self.embed.table
        if own and plan.kernels and table is not None and images.ndim == 4:
            rows = images.shape[0] * table.shape[1]
            plan = Plan(True, plan.device_name, self._folds(rows, table, plan))
            needed = self._counters_needed(rows, table, plan)
        x, h, *counters = self.embed(images, stages[0].norm, plan, needed)
        if own:
            folded = plan.ln_folded
            if folded is None:
                folded = plan.kernels and self._folds(x.shape[0] * x.shape[1], x, plan)
            plan = Plan(plan.kernels, plan.device_name, folded, *counters)
        sums = None
        if adds_in_products(stages, self.head.norm, self.pruned, x, plan):
            sums = self.bias_sums
            self.summed.renew(sums, stages)
        following: list[Stage | None] = [*stages[1:], None]
        for i, (stage, reader) in enumerate(zip(stages, following, strict=True)):
            queries = 1 if i == self.pruned else None
            if queries is not None:
                x = x[:, :queries]
            pairs = self._pairs(stage, h, queries, plan)
            if reader is not None and reader.reads_raw and plan.kernels and plan.ln_folded:
                x, h = _close_raw(stage, x, pairs, reader.norm, plan)
                continue
            norm = self.head.norm if reader is None else reader.norm
            if sums is not None and norm is not None:
                x, h = close_by_products(x, sums[i], pairs, norm.eps)
            else:
                x, h = _close(stage, x, pairs, norm, plan)
        return self.head(h, plan.kernels)

    def source_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the model this one was made of: timm's keys, the very same tensors.

        Folded weights cannot be unfolded (a norm's weight may be 0), so the source's tensors are kept by reference.

        Raises:
            UsageError: made with ``keep_source=False``, or other weights were loaded since.
        """
        if self._source is None:
            raise UsageError("this FusedViT holds no source weights: keep_source=False, or it loaded others since")
        return dict(self._source)

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels that the position table is for."""
        size: Any = self.embed.stem.img_size
        return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))

    @property
    def in_chans(self) -> int:
        """Channels of an image."""
        return next(m.in_channels for m in self.embed.stem.modules() if isinstance(m, nn.Conv2d))

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load folded weights, of this structure, as torch does; the source's are others then and are let go."""
        self._source = None
        return super().load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> "FusedViT":
        """Stay in eval mode; asking for train mode is a mistake.

        Raises:
            UsageError: ``mode`` is True.
        """
        if mode:
            raise UsageError("a FusedViT is for inference; train the timm model and fuse it again")
        super().train(False)
        return self

    def _tune(self, batch_sizes: Sequence[int], size: tuple[int, int] | None) -> None:
        from vtk.fused.tuning_card import tune_model

        for found in tune_model(self, batch_sizes, size):
            console.say(str(found))
            if found.stopped:
                raise KeyboardInterrupt

    def _weight(self) -> Tensor:
        bias: Tensor = next(iter(self.stages)).bias  # type: ignore[assignment]
        return bias

    def _cast(self, images: Tensor) -> Tensor:
        if not images.is_floating_point():
            raise UsageError(f"`images` are {images.dtype}; give normalised images of a floating type")
        return images.to(self.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedViT":
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        for key, value in self.__dict__.items():
            # the source's tensors are references here too
            copied.__dict__[key] = value if key == "_source" else copy.deepcopy(value, memo)
        return copied

    def _folds(self, rows: int, like: Tensor, plan: Plan) -> bool:
        """Whether a pass with kernels over so many tokens like these (…, C) is one without norms of their own."""
        if self.ln_folded is not None:
            return self.ln_folded
        stages: list[Any] = list(self.stages)
        if not all(stage.reads_raw for stage in stages[1:]):
            return False
        hidden = max(stage.hidden() for stage in stages)
        return choose("ln_folded", rows, like.shape[-1], hidden, like.dtype, plan.device_name) == "folded"

    def _counters_needed(self, rows: int, like: Tensor, plan: Plan) -> int:
        """How many counters the embedding should zero for products that finish themselves, 0 where none does.

        There they are free. A stem that is no product of patches would start a kernel for them, and goes without.
        """
        if plan.device_name is None or rows > FEW_ROWS:
            return 0
        op = "linear_residual" if plan.ln_folded else "splitk_linear"
        for channels, length in self._ends:
            if default_splits(rows, channels, length) > 1:
                if choose(op, rows, channels, length, like.dtype, plan.device_name) == "finish":
                    return counters_needed(rows, channels)
        return 0

    def _pairs(self, stage: Stage, h: Reading, queries: int | None, plan: Plan) -> Iterable[Pair]:
        """Return a stage's activations and their matrices."""
        if isinstance(h, RawTokens):
            return stage.pairs(h, queries, plan, False)
        if stage.front:
            h = context_mean(h, stage.front_scale)
        return stage.pairs(h, queries, plan, self._splits(stage, h))

    def _splits(self, stage: Stage, h: Tensor) -> bool:
        """Whether the branches are cheaper one by one: their wide activation would not stay in the CPU's cache."""
        if stage.branches == 1 or h.is_cuda or torch.compiler.is_exporting():
            return False
        return h.shape[0] * h.shape[1] * stage.widest() * h.element_size() > self.cache_bytes // 2


def _sum_again(model: FusedViT, incompatible_keys: Any) -> None:
    stages: list[Any] = list(model.stages)
    model.bias_sums = sums_of_biases(stages)


def _close(stage: Stage, x: Tensor, pairs: Iterable[Pair], norm: NormSpec | None, plan: Plan) -> tuple[Tensor, Tensor]:
    """Return x + the stage's output and its form normalised for what follows."""
    if stage.end:
        x = context_broadcast(x, accumulate(None, stage.bias, pairs), stage.end_scale)
    elif not plan.kernels:
        x = accumulate(x, stage.bias, pairs)
    elif norm is None or norm.kind != "layer":
        x = x + accumulate(None, stage.bias, pairs)
    else:
        return close_with_norm(x, stage.bias, list(pairs), norm.eps, plan)
    return x, (x if norm is None else normalize(x, norm, plan.kernels))


def _close_raw(stage: Stage, x: Tensor, pairs: Iterable[Pair], norm: NormSpec, plan: Plan) -> tuple[Tensor, RawTokens]:
    """Return x + the stage's output, and the same with its rows' statistics for a stage that reads raw tokens."""
    if stage.end:
        m = accumulate(None, stage.bias, pairs)
        x, row_stats = context_broadcast(x, m, stage.end_scale, stats=True)
    else:
        last = list(pairs)
        splits = _slices(*last[-1], plan)
        x, row_stats = close_with_stats(x, stage.bias, last, splits, plan.counters if splits > 1 else None)
    return x, RawTokens(x, row_stats, norm.eps)


def close_with_norm(x: Tensor, bias: Tensor, pairs: list[Pair], eps: float, plan: Plan) -> tuple[Tensor, Tensor]:
    """Return y = x + bias + Σ activation · matrixᵀ and its LayerNorm.

    A single product too small to fill the card is cut along its length where a choice says so: `add_norm` sums the
    slices, or the product itself does and `norm` follows. Each is two kernels, like cuBLAS and `add_norm`.
    """
    if len(pairs) == 1:
        activation, matrix = pairs[0]
        rows, (features, length) = activation.shape[0] * activation.shape[1], matrix.shape
        choice = choose("splitk_linear", rows, features, length, x.dtype, plan.device_name)
        splits = default_splits(rows, features, length)
        if choice == "finish" and splits > 1 and plan.counters is not None:
            y, _ = linear_residual(activation, matrix, bias, x, splits, plan.counters)
            return y, kernel_norm(y, eps)[0]
        if choice != "aten":
            return add_norm(x, None, eps, partials=splitk_linear(activation, matrix, splits), bias=bias)[:2]
    return add_norm(x, accumulate(None, bias, pairs), eps)[:2]


def _slices(activation: Tensor, matrix: Tensor, plan: Plan) -> int:
    """Return into how many slices `linear_residual` cuts a product, 1 for none."""
    if plan.counters is None:
        return 1
    rows, (features, length) = activation.shape[0] * activation.shape[1], matrix.shape
    splits = default_splits(rows, features, length)
    if splits > 1 and choose("linear_residual", rows, features, length, matrix.dtype, plan.device_name) != "finish":
        return 1
    return splits


def accumulate(start: Tensor | None, bias: Tensor, pairs: Iterable[Pair]) -> Tensor:
    """Return start + bias + Σ activation · matrixᵀ, each term added inside its product.

    Args:
        start: residual stream (B, N, C), or None for 0.
        bias: (C).
        pairs: of activations (B, N, K) and matrices (C, K); K may differ.
    """
    if torch.compiler.is_exporting() and start is not None:
        # exporters write a product of matrices of two axes with reshapes around it
        return sum((F.linear(a, w) for a, w in pairs), start + bias)
    total = None if start is None else start + bias
    for activation, matrix in pairs:
        if total is None:
            total = F.linear(activation, matrix, bias)
        else:
            sums, product = total.flatten(0, 1), (activation.flatten(0, 1), matrix.t())
            # `total` is this function's own, so that without autograd it need not be copied
            plain = torch.is_grad_enabled() or observed()
            flat = torch.addmm(sums, *product) if plain else sums.addmm_(*product)
            total = flat.view(total.shape)
    assert total is not None
    return total
