"""timm's NaFlexVit (SigLIP 2, C-RADIO) for images on one grid a batch; patches of mixed sizes stay with timm."""

from typing import Any

import torch
from timm.layers import PatchDropoutWithIndices, PatchEmbed
from timm.models.eva import EvaBlock
from timm.models.naflexvit import NaFlexEmbeds, NaFlexVit
from torch import Tensor, nn

from vtk.fused.blocks import fold_block
from vtk.fused.checks import check_silent, copied, is_exactly
from vtk.fused.embed import TokenParts
from vtk.fused.families.eva import fold_eva_block
from vtk.fused.families.reader import Reader
from vtk.fused.families.vision_transformer import VisionTransformerReader
from vtk.fused.norms import refusal
from vtk.fused.rotary import Rotary
from vtk.fused.sizes import Grid
from vtk.fused.stages import Stage


class NaFlexReader(Reader):
    """Reads models of timm's blocks or `EvaBlock`, whose positions are resampled to the grid of the images."""

    kind = NaFlexVit
    forwards = ("forward", "forward_features", "forward_head", "_forward_embeds", "_pool")
    silent = ("head_drop",)

    head_parts = VisionTransformerReader.head_parts

    def check(self, model: Any) -> None:
        """Refuse what computes something else; see `Reader.check`."""
        super().check(model)
        if type(model.embeds) is not NaFlexEmbeds:
            raise refusal("embeds", model.embeds, "only timm's NaFlexEmbeds is known here")
        check_silent(model.embeds, "embeds", "pos_drop")
        if model.embeds.norm_input is not None:
            raise refusal("embeds.norm_input", model.embeds.norm_input, "a norm of the pixels of each patch")
        if model.patch_drop is not None and type(model.patch_drop) is not PatchDropoutWithIndices:
            check_silent(model, "", "patch_drop")

    def token_parts(self, model: Any) -> TokenParts:
        """Return what the tokens are made of."""
        embeds = model.embeds
        prefix = [t for t in (embeds.cls_token, embeds.reg_token) if t is not None]
        resampled = None if embeds.pos_embed_type == "none" else Positions(embeds)
        return TokenParts(_stem(model), prefix, None, 0, True, model.norm_pre, resampled)

    def rotary(self, model: Any, like: Tensor) -> Rotary | None:
        """Return the model's rotary tables, None where it has learned positions alone."""
        if model.rope is None:
            return None
        return Rotary(
            model.rope, like, grid=_own_grid(model), dynamic=True,
            rotate_half=bool(getattr(model.blocks[0].attn, "rotate_half", False)),
            prefix=model.num_prefix_tokens, per_block=bool(model.rope_is_mixed),
        )  # fmt: skip

    def stages(self, model: Any, i: int, like: Tensor, *, ffn: bool = True) -> list[Stage]:
        """Fold block ``i``; see `Reader.stages`."""
        if is_exactly(model.blocks[i], EvaBlock):
            return fold_eva_block(model, i, like, ffn=ffn, per_block=bool(model.rope_is_mixed))
        if model.rope is not None:
            raise refusal(f"blocks.{i}", model.blocks[i], "it knows no rotary embedding, and the model has one")
        return fold_block(model.blocks[i], like, f"blocks.{i}", ffn=ffn)


class Positions(nn.Module):
    """The learned positions of patches, of both axes together or apart, resampled by timm's own functions."""

    def __init__(self, embeds: Any) -> None:
        """Copy what the positions are made of."""
        super().__init__()
        self.embeds: Any = copied(embeds)
        self.embeds.proj, self.embeds.norm = nn.Identity(), nn.Identity()
        self.embeds.cls_token = self.embeds.reg_token = self.embeds.patch_interpolator = None

    def forward(self, grid: Grid) -> Tensor:
        """Return (1, height · width, C) for a grid in patches."""
        embeds = self.embeds
        learned = embeds.pos_embed_type == "learned"
        like = embeds.pos_embed if learned else embeds.pos_embed_y
        table: Tensor = like.new_zeros(1, grid[0] * grid[1], embeds.embed_dim)
        add = embeds._apply_learned_pos_embed if learned else embeds._apply_factorized_pos_embed
        add(table, grid_size=list(grid))
        return table


def _own_grid(model: Any) -> Grid:
    """Return the grid of the size that the weights were trained at, which the model itself does not keep."""
    height, width = model.embeds.patch_size
    config = getattr(model, "pretrained_cfg", None) or {}
    size = tuple(config.get("input_size", ()))[1:]
    if len(size) == 2 and not (size[0] % height or size[1] % width):
        return size[0] // height, size[1] // width
    rows, columns = model.embeds.pos_embed_grid_size or (16, 16)
    return int(rows), int(columns)


def _stem(model: Any) -> PatchEmbed:
    """Return the embedding of patches as a convolution, the linear layer's columns in a convolution's order."""
    embeds, (height, width) = model.embeds, model.embeds.patch_size
    weight, bias = embeds.proj.weight.detach(), embeds.proj.bias
    if embeds.is_linear:
        if type(embeds.proj) is not nn.Linear:
            raise refusal("embeds.proj", embeds.proj, "only torch.nn.Linear is known here")
        order = (-1, height, width, embeds.in_chans) if embeds.channels_last else (-1, embeds.in_chans, height, width)
        weight = weight.view(order)
        weight = weight.permute(0, 3, 1, 2).contiguous() if embeds.channels_last else weight
    rows, columns = _own_grid(model)
    with torch.device(weight.device):
        stem = PatchEmbed(
            (rows * height, columns * width), (height, width), embeds.in_chans, embeds.embed_dim,
            output_fmt="NHWC", bias=bias is not None, strict_img_size=False, dynamic_img_pad=embeds.dynamic_img_pad,
        )  # fmt: skip
    stem.proj.weight = nn.Parameter(weight, requires_grad=False)
    stem.proj.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
    stem.norm = copied(embeds.norm)
    return stem
