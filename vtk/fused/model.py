"""`FusedViT`, the inference model of `fuse`: folded, merged blocks run by kernels, by torch or as CUDA graphs."""

import copy
import functools
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vtk import console
from vtk.errors import UsageError
from vtk.fused.attention_stage import AttentionStage
from vtk.fused.embed import Embedding
from vtk.fused.graph_module import Graphed
from vtk.fused.head import Head
from vtk.fused.mlp_stage import MlpStage
from vtk.fused.onednn_prepack import observed
from vtk.fused.relative_bias import RelativeBias
from vtk.fused.residual import SummedBiases, adds_in_products, close_by_products, sums_of_biases
from vtk.fused.rotary import Rotary
from vtk.fused.sizes import Derived
from vtk.fused.stage_input import Pair, RawTokens, Reading
from vtk.fused.stage_output import close, close_raw
from vtk.fused.stages import Plan, Stage, context_mean
from vtk_kernels._device import FEW_ROWS
from vtk_kernels._dispatch import HALF
from vtk_kernels._residual_kernel import counters_needed
from vtk_kernels.choices import choose, device_name
from vtk_kernels.splitk_linear import default_splits

UNKNOWN = 32 << 20
"""Bytes assumed where the system does not say."""


@functools.cache
def last_level_cache(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the bytes of the largest cache of CPU 0 as Linux describes it, else `UNKNOWN`."""
    sizes = []
    for file in root.glob("index*/size"):
        try:
            match = re.fullmatch(r"(\d+)([KMG]?)", file.read_text(encoding="ascii").strip())
        except OSError:
            continue
        if match:
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]])
    return max(sizes, default=0) or UNKNOWN


class FusedViT(Graphed):
    """An inference model of folded, merged blocks.

    On CUDA it is replayed as one CUDA graph per batch size, in fp16 and bf16 of the Triton operations. Elsewhere it is
    plain torch. It holds no gradient and has no training mode.

    The operations have two forms. With norms of their own a block is 7 kernels: qkv, attention, output projection, add
    and norm, fc1 with GELU or SwiGLU, fc2, add and norm; 8 with a norm of the hidden layer (EVA-02). Folded it is 5:
    the norms' statistics come from the products that write what is normalised, their scale is applied by those that
    read it, and no kernel only normalises.

    Attributes:
        graphs: whether batches of up to 256 images are captured at their first call and replayed (CUDA only; the
            default). Eight shapes are kept, the least recently used one goes. Traced, transformed, with gradients,
            inside of another capture, with hooks of its parts, or where a capture fails, it runs kernel by kernel.
        ln_folded: which form runs on CUDA in fp16 and bf16: folded, not, or by None the one that
            `vtk_kernels.choose` names for the shape; that folds only where all stages after the first can. By True
            those that can are folded. Each form has graphs of its own.
        cache_bytes: the last-level cache the CPU's plan counts with.
        rotary: its rotary tables, None for a model that has none.
        bias_sums: (stages, C), of the biases of each stage and all before it, for the form that leaves them out of the
            residual stream; in no state dict, and written anew where that form meets other biases (``bias.data.add_``
            escapes the counter that tells).
        summed: of which biases they are.
    """

    bias_sums: Tensor

    def __init__(
        self, embed: Embedding, stages: Sequence[Stage], head: Head, *, pruned: int, rotary: Rotary | None = None
    ) -> None:
        super().__init__()
        self.embed, self.stages, self.head = embed, nn.ModuleList(stages), head
        self.rotary = rotary
        self._derived = [part for part in self.modules() if isinstance(part, Derived)]
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
        if in_autocast(images.device.type):  # the model's own type holds, for the residual stream too
            with torch.autocast(images.device.type, enabled=False):
                return self.compute(images, plan)
        images = self._cast(images)
        if plan is None:
            kernels = images.is_cuda and images.dtype in HALF and not torch.compiler.is_exporting()
            plan = Plan(kernels, device_name(images) if kernels else None, None)
        stages: list[Any] = list(self.stages)
        own, needed, table = plan.ln_folded is None, 0, None
        if own and plan.kernels and images.ndim == 4:
            table = self.embed.table_for(images)
        if table is not None:
            rows = images.shape[0] * table.shape[1]
            plan = Plan(True, plan.device_name, self._folds(rows, table, plan))
            needed = self._counters_needed(rows, table, plan)
        x, h, *counters = self.embed(images, stages[0].norm, plan, needed)
        ropes = self.ropes(images)
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
            queries = self.head.queries if i == self.pruned else None
            if queries is not None:
                x = x[:, :queries]
            pairs = self._pairs(stage, h, queries, plan, ropes)
            if reader is not None and reader.reads_raw and plan.kernels and plan.ln_folded:
                x, h = close_raw(stage, x, pairs, reader.norm, plan)
                continue
            norm = self.head.norm if reader is None else reader.norm
            if sums is not None and norm is not None:
                x, h = close_by_products(x, sums[i], pairs, norm.eps, norm.kind == "rms")
            else:
                x, h = close(stage, x, pairs, norm, plan)
        return self.head(h, plan.kernels)

    def ropes(self, images: Tensor) -> Sequence[Tensor]:
        """Return the rotary tables for images of this size, (R, D) or (H, R, D) each; none for a model without."""
        return () if self.rotary is None else self.rotary.tables(self.embed.grid_of(images))

    def prepare(self, images: Tensor) -> None:
        """Make the tables for images of this size, lest a CUDA graph's capture or replay should have to.

        Tables of 32 sizes are kept; a further one lets them go, and the graphs that read them.

        Raises:
            UsageError: no tensor, such as the patches of images of several sizes (NaFlex).
        """
        if not isinstance(images, Tensor):
            raise UsageError(
                f"a fused model takes images of one size as a tensor (B, chans, height, width), not a "
                f"{type(images).__name__}; use the model itself for patches of several sizes"
            )
        if images.ndim != 4 or observed():  # a recorded pass makes its own
            return
        for part in self._derived:
            part.follow()
        if not self.embed.dynamic:
            return
        grid = self.embed.grid_of(images)
        caches = [self.embed.positions, self.embed.tables, *([] if self.rotary is None else [self.rotary.sizes])]
        if any(cache.full and grid not in cache for cache in caches):
            self._graph_cache.expire()
            for cache in caches:
                cache.clear()
        self.embed.prepare(images)
        self.ropes(images)

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
        """Load folded weights, of this structure, as torch does; the source's are others then and are let go.

        Raises:
            UsageError: ``assign`` to a model on the meta device whose tables are made of what is in no state dict.
        """
        if kwargs.get("assign", args[2:3] == (True,)):
            self._check_tables()
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

    def _check_tables(self) -> None:
        """Refuse tensors beside tables without values: torch would compute with them, and not always say so."""
        for name, part in self.named_modules():
            if isinstance(part, Rotary | RelativeBias) and any(t.is_meta for t in part.buffers()):
                raise UsageError(
                    f"`assign=True` to a fused model on the meta device: tables of `{name}` are in no state dict and "
                    "have no values there; fuse a model that has values, on the device, and load into that"
                )

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

    def _pairs(
        self, stage: Stage, h: Reading, queries: int | None, plan: Plan, ropes: Sequence[Tensor]
    ) -> Iterable[Pair]:
        """Return a stage's activations and their matrices."""
        if isinstance(h, RawTokens):
            return stage.pairs(h, queries, plan, False, ropes)
        if stage.front:
            h = context_mean(h, stage.front_scale)
        return stage.pairs(h, queries, plan, self._splits(stage, h), ropes)

    def _splits(self, stage: Stage, h: Tensor) -> bool:
        """Whether the branches are cheaper one by one: their wide activation would not stay in the CPU's cache."""
        if stage.branches == 1 or h.is_cuda or torch.compiler.is_exporting():
            return False
        return h.shape[0] * h.shape[1] * stage.widest() * h.element_size() > self.cache_bytes // 2


def in_autocast(kind: str) -> bool:
    """Whether autocast is on for a kind of device; there are kinds (meta) that know none."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _sum_again(model: FusedViT, incompatible_keys: Any) -> None:
    stages: list[Any] = list(model.stages)
    model.bias_sums = sums_of_biases(stages)
