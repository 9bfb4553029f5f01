"""Base of the masked methods: a backbone with a mask token, objectives, checks."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk import console
from vtk.card import InputSpec
from vtk.data.loading.loader import Transform
from vtk.errors import UsageError
from vtk.models.arguments import parse_model_kwargs
from vtk.models.initialization.draw import reset, reset_tensor
from vtk.models.inputs import check_size
from vtk.training.engine.step_rule import StepRule
from vtk.training.objectives.base import Batch
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.pretrain.masks import Masks, make_masks
from vtk.training.pretrain.method import Setting
from vtk.training.pretrain.patches import blank_out, independent, patch_grid, patchify, pick, positions_of

At = Literal["tokens", "pixels"]


class MaskedModel(nn.Module):
    """A backbone with a predictor of hidden patches; only the backbone is saved."""

    backbone: Any

    def __init__(self, backbone: nn.Module, at: At) -> None:
        super().__init__()
        self.backbone, self.at, self.grid = backbone, at, patch_grid(backbone)

    def no_weight_decay(self) -> set[str]:
        """Return parameters without weight decay: the mask token, and those that the backbone names."""
        own: Any = getattr(self.backbone, "no_weight_decay", set)
        return {"mask_token", *(f"backbone.{name}" for name in own())}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's blocks in the backward pass."""
        self.backbone.set_grad_checkpointing(enable)

    def seen(self, images: Tensor, mask: Tensor) -> Tensor:
        """Return images (B, C, H, W) as the stem sees them."""
        return blank_out(images, mask, self.grid) if self.at == "pixels" else images


class TokenModel(MaskedModel):
    """Hidden patches are replaced by a learned token behind the stem; a linear layer predicts them (BEiT, SimMIM).

    Args:
        backbone: a timm model whose ``forward_features`` gives (B, prefix + N, C).
        outputs: numbers to predict of each hidden patch.
        at: where patches are hidden.
        kind: of the linear layer, in the table of `vtk.models.initialization`.
    """

    def __init__(self, backbone: nn.Module, outputs: int, at: At, kind: str = "beit.linear") -> None:
        super().__init__(backbone, at)
        width = int(self.backbone.num_features)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, int(self.backbone.embed_dim)))
        self.predict = nn.Linear(width, outputs)
        reset_tensor(self.mask_token, "masked.mask_token")
        reset(self.predict, kind)

    def tokens(self, images: Tensor, mask: Tensor) -> Tensor:
        """Return the tokens (B, N, C) of all patches of images, of which ``mask`` (B, N) is hidden, after the norm."""

        def hide(stem: nn.Module, args: tuple[Any, ...], embedded: Tensor) -> Tensor:
            where = mask.reshape(*embedded.shape[:-1], 1)  # (B, N, C), or (B, rows, columns, C)
            return torch.where(where, self.mask_token.reshape(-1), embedded)

        handle = self.backbone.patch_embed.register_forward_hook(hide)
        try:
            tokens: Tensor = self.backbone.forward_features(self.seen(images, mask))
        finally:
            handle.remove()
        return tokens[:, -mask.shape[1] :]

    def forward(self, images: Tensor, mask: Tensor, *, count: int) -> Tensor:
        """Return predictions (B, count, outputs) of the ``count`` hidden patches of each image, in ascending order."""
        predicted: Tensor = self.predict(pick(self.tokens(images, mask), positions_of(mask, count)))
        return predicted


class PixelObjective:
    """Mean distance between predicted and true pixels of hidden patches, in fp32 or wider.

    Args:
        masks: what is hidden.
        distance: ``l1`` (SimMIM, eq. 2: L1 over the hidden pixels, by their number) or ``l2`` (MAE: mean squared).
        target: from patches (B, M, h·w·C) to what is predicted.
    """

    def __init__(
        self, masks: Masks, distance: Literal["l1", "l2"], target: Callable[[Tensor], Tensor] = lambda patches: patches
    ) -> None:
        self.masks, self.distance, self.target = masks, distance, target

    def start_epoch(self, seed: int) -> None:
        """Do nothing: masks follow from the seed of each image."""

    def prepare(self, batch: Batch) -> Batch:
        """Turn the seeds into masks."""
        return Batch(batch.images, self.masks.draw(batch.labels), batch.stream)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean over hidden patches, of which every image has the same number."""
        images, mask = batch.images, batch.labels
        count = self.masks.count
        predicted = model(images, mask, count=count)
        predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
        true = self.target(pick(patchify(images, self.masks.grid), positions_of(mask, count)))
        distance = F.l1_loss if self.distance == "l1" else F.mse_loss
        return distance(predicted, true.to(predicted.dtype)), {}


class MaskedMethod:
    """Base of the masked methods; see `vtk.training.pretrain.method.Method`."""

    labelled = False
    masks: Masks

    def check(self, backbone: nn.Module, config: PretrainConfig, spec: InputSpec) -> None:
        """Refuse a backbone whose tokens are not its patches, and masks that hide no patch or all.

        Raises:
            UsageError: the backbone or the masks do not fit.
        """
        grid = patch_grid(backbone)
        probe: Any = copy.deepcopy(backbone).eval()
        sides = check_size(config.model, None, parse_model_kwargs(config.model_kwargs))
        with torch.no_grad():
            shape = probe.forward_features(torch.zeros(1, 3, *sides, device="meta")).shape
        if len(shape) != 3 or shape[1] != grid[0] * grid[1] + getattr(backbone, "num_prefix_tokens", 0):
            raise UsageError(
                f"{type(backbone).__name__} merges its patches: features {tuple(shape)} for {grid[0]}×{grid[1]} "
                "patches; masked modelling needs a model that keeps all patches, such as vit_* or beit_*"
            )
        rows, columns = (side * own // pixels for side, own, pixels in zip(spec.size, grid, sides, strict=True))
        self.masks = self._masks((rows, columns), config)

    def transforms(self, augment: Callable[..., Transform], plain: Transform) -> tuple[Transform, Transform]:
        """Return both unchanged."""
        return augment(), plain

    def remarks(self, row: Mapping[str, float]) -> list[str]:
        """Return none."""
        return []

    def step_rule(self, model: nn.Module) -> StepRule | None:
        """Return None: steps are plain."""

    def _masks(self, grid: tuple[int, int], config: PretrainConfig) -> Masks:
        assert config.mask_ratio is not None and config.mask_shape is not None
        return make_masks(grid, config.mask_ratio, config.mask_shape, config.mask_unit)

    def ready(self, model: nn.Module, setting: Setting) -> nn.Module:
        """Freeze parameters that the loss does not reach, and print notes on masks and stem."""
        masks, spec = self.masks, setting.spec
        training = model.training
        model.eval()
        mask = masks.draw(torch.zeros(1, dtype=torch.int64))
        output = model(torch.zeros(1, spec.in_chans, *spec.size), mask, count=masks.count)
        names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
        reached = torch.autograd.grad(output.sum(), parameters, allow_unused=True)
        unused = [name for name, gradient in zip(names, reached, strict=True) if gradient is None]
        for name in unused:
            model.get_parameter(name).requires_grad_(False)
        backbone: Any = model.backbone
        if setting.ranks.main:
            self._tell(backbone, unused, setting)
        model.train(training)
        return model

    def _tell(self, backbone: nn.Module, unused: list[str], setting: Setting) -> None:
        rows, columns = self.masks.grid
        total = rows * columns
        console.say(
            f"{self.masks.count} of {total} patches ({rows}×{columns}) of every image are masked, "
            f"{'in blocks' if self.masks.shape == 'block' else 'at random'}"
        )
        if unused:
            console.say(
                f"{len(unused)} tensors get no gradient and are frozen: {', '.join(unused[:3])}"
                + (", …" if len(unused) > 3 else "")
            )
        if setting.config.mask_at == "tokens" and not independent(
            backbone, (setting.spec.in_chans, *setting.spec.size)
        ):
            console.warn(
                "the patches of this stem overlap, so visible tokens contain masked pixels; use --mask-at pixels, or "
                "a stem with independent patches (linear, hmlp)"
            )
