"""The families of timm that are tested, each as small as it can be made, with their parameters sorted by hand.

A pattern is a shell pattern for a parameter's name without ``.weight`` or ``.bias``; ``#`` is any number. What no
pattern of a family takes is "other". The patterns were written from the models' printed structure, not from the lists
of classes in ``vtk.training.policies.module_kinds``, which they are there to check.
"""

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from timm.models import gcvit, metaformer, mvitv2, nest, register_model, volo
from torch import nn

GROUPS = ("attention", "head", "position", "stem", "ffn", "norm")
SMALL = {"depth": 1, "embed_dim": 32, "num_heads": 2}


@dataclass(frozen=True)
class Family:
    """A model and what its parameters are.

    Attributes:
        name: timm model name.
        size: pixels.
        kwargs: arguments that make it small.
        attention, head, position, stem, ffn, norm: patterns, separated by spaces.
        batch_norm: it has BatchNorms that attention-only training leaves frozen.
        fixed: its weights fit one size of images only.
    """

    name: str
    size: int
    kwargs: dict[str, Any] = field(default_factory=dict)
    attention: str = "blocks.#.attn.*"
    head: str = "head"
    position: str = "pos_embed"
    stem: str = "patch_embed.*"
    ffn: str = "blocks.#.mlp.*"
    norm: str = "blocks.#.norm# norm"
    batch_norm: bool = False
    fixed: bool = False

    def group(self, name: str) -> str:
        """Return the group of a parameter; it is "other" where no pattern takes it, and an error where two do."""
        taken = [group for group in GROUPS if any(_matches(name, p) for p in getattr(self, group).split())]
        assert len(taken) < 2, f"{self.name}: {name} is {' and '.join(taken)}"
        return taken[0] if taken else "other"

    def unused(self, model: nn.Module) -> list[str]:
        """Return the patterns that take no parameter: a family that has changed, or a slip of the pen."""
        names = [name for name, _ in model.named_parameters()]
        patterns = [p for group in GROUPS for p in getattr(self, group).split()]
        return [p for p in patterns if not any(_matches(n, p) for n in names)]

    @property
    def flags(self) -> tuple[str, ...]:
        """The arguments as ``--model-kwargs`` takes them."""
        return tuple(f"{key}={str(value).lower()}" for key, value in self.kwargs.items())


def _matches(name: str, pattern: str) -> bool:
    short = re.sub(r"\.(weight|bias)$", "", name)
    return fnmatchcase(re.sub(r"\d+", "#", short) if "#" in pattern else short, pattern)


# these entry points take no sizes, so that smaller ones are registered here
@register_model
def tiny_volo(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """VOLO with one outlooker, one transformer and one class-attention block."""
    small = {"layers": (1, 1, 0, 0), "embed_dims": (16, 32, 32, 32), "num_heads": (1, 2, 2, 2), "stem_hidden_dim": 8,
             "post_layers": ("ca",)}  # fmt: skip
    return volo._create_volo("volo_d1_224", pretrained=pretrained, **{**small, **kwargs})


@register_model
def tiny_nest(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """NesT of three levels with one block each."""
    small = {"embed_dims": (16, 16, 32), "num_heads": (1, 1, 2), "depths": (1, 1, 1)}
    return nest._create_nest("nest_tiny", pretrained=pretrained, **{**small, **kwargs})


@register_model
def tiny_gcvit(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """GC ViT of width 16."""
    small = {"depths": (1, 1, 1, 2), "num_heads": (1, 1, 1, 1), "embed_dim": 16}
    return gcvit._create_gcvit("gcvit_xxtiny", pretrained=pretrained, **{**small, **kwargs})


@register_model
def tiny_mvit(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """MViTv2 of two stages."""
    cfg = mvitv2.MultiScaleVitCfg(depths=(1, 1), embed_dim=32, num_heads=1)
    kwargs.setdefault("img_size", 224)
    return mvitv2.build_model_with_cfg(mvitv2.MultiScaleVit, "mvitv2_tiny", pretrained, model_cfg=cfg, **kwargs)


@register_model
def tiny_caformer(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """CAFormer: two stages of convolutions and two of attention."""
    kwargs.pop("img_size", None)
    sep, attention = metaformer.SepConv, metaformer.Attention
    small = {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32),
             "token_mixers": [sep, sep, attention, attention],
             "norm_layers": [metaformer.LayerNorm2dNoBias] * 2 + [metaformer.LayerNormNoBias] * 2}  # fmt: skip
    return metaformer._create_metaformer("caformer_s18", pretrained=pretrained, **{**small, **kwargs})


_STAGES = {
    "attention": "layers.#.blocks.#.attn.*",
    "ffn": "layers.#.blocks.#.mlp.*",
    "norm": "layers.#.blocks.#.norm# layers.#.downsample.norm norm",
    "head": "head.fc",
    "position": "",
}
_PARTITION = {
    "attention": "stages.#.blocks.#.attn_block.attn.* stages.#.blocks.#.attn_grid.attn.*",
    "ffn": "stages.#.blocks.#.attn_block.mlp.* stages.#.blocks.#.attn_grid.mlp.*",
    "head": "head.fc", "position": "", "stem": "stem.*", "batch_norm": True,
}  # fmt: skip
_CONV_NORMS = "stages.#.blocks.#.conv.pre_norm stages.#.blocks.#.conv.norm#"
_POOL = {
    "attention": "blocks.#.attn.* attn_pool.latent attn_pool.q attn_pool.kv attn_pool.proj",
    "ffn": "blocks.#.mlp.* attn_pool.mlp.*",
}
_MOBILE = {
    "attention": "stages.#.#.transformer.#.attn.*", "ffn": "stages.#.#.transformer.#.mlp.*", "head": "head.fc",
    "position": "", "stem": "stem.*", "batch_norm": True,
}  # fmt: skip
_LEVIT = {
    "attention": "stages.#.blocks.#.attn.* stages.#.downsample.attn_downsample.*",
    "ffn": "stages.#.blocks.#.mlp.* stages.#.downsample.mlp.*", "head": "head.linear head_dist.linear",
    "norm": "head.bn head_dist.bn", "position": "", "stem": "stem.*", "batch_norm": True, "fixed": True,
}  # fmt: skip
_COATNET = {
    "attention": "stages.#.blocks.#.attn.*", "ffn": "stages.#.blocks.#.mlp.*", "head": "head.fc", "position": "",
    "stem": "stem.*",
    "norm": "stages.#.blocks.#.pre_norm stages.#.blocks.#.norm# stages.#.blocks.#.norm#.norm norm",
    "batch_norm": True,
}  # fmt: skip

FAMILIES = [
    Family("vit_tiny_patch16_224", 32, SMALL),
    Family("deit_tiny_patch16_224", 32, SMALL),
    Family("deit_tiny_distilled_patch16_224", 32, SMALL, head="head head_dist"),
    Family("deit3_small_patch16_224", 32, SMALL),
    Family("vit_small_patch14_dinov2", 28, SMALL),
    Family("vit_small_patch14_reg4_dinov2", 28, SMALL),
    Family("vit_medium_patch16_reg4_gap_256", 32, SMALL, norm="blocks.#.norm# fc_norm"),
    Family("vit_base_patch16_clip_224", 32, SMALL, norm="norm_pre blocks.#.norm# norm"),
    Family("vit_base_patch16_siglip_224", 32, SMALL, norm="blocks.#.norm# norm attn_pool.norm", **_POOL),
    Family("vit_pe_core_tiny_patch16_384", 32, SMALL, norm="norm_pre blocks.#.norm# norm attn_pool.norm", **_POOL),
    Family("flexivit_small", 32, SMALL),
    Family("naflexvit_base_patch16_gap", 32, SMALL, position="embeds.pos_embed", stem="embeds.proj",
           norm="blocks.#.norm# fc_norm"),
    Family("vit_small_patch16_18x2_224", 32, SMALL, attention="blocks.#.attns.#.attn.*", ffn="blocks.#.ffns.#.mlp.*",
           norm="blocks.#.attns.#.norm blocks.#.ffns.#.norm norm"),
    Family("vit_relpos_small_patch16_224", 32, SMALL, position="", norm="blocks.#.norm# fc_norm"),
    Family("samvit_base_patch16_224", 32, SMALL, position="", head="head.fc", norm="blocks.#.norm# neck"),
    Family("vit_tiny_r_s16_p8_224", 32, SMALL),
    Family("vit_small_r26_s32_224", 64, SMALL),
    Family("vit_base_patch16_rope_224", 32, SMALL, position=""),
    Family("vit_small_patch16_rope_ape_224", 32, SMALL),
    Family("vit_small_patch16_rope_mixed_224", 32, SMALL, position="", attention="blocks.#.attn.* rope.freqs"),
    Family("vit_small_patch16_rope_mixed_ape_224", 32, SMALL, attention="blocks.#.attn.* rope.freqs"),
    Family("vit_small_patch16_dinov3", 32, SMALL, position=""),
    Family("vit_small_plus_patch16_dinov3_qkvb", 32, SMALL, position=""),
    Family("vit_base_patch16_sapiens2", 32, {**SMALL, "num_heads": 4, "num_kv_heads": 2}, position=""),
    Family("eva02_tiny_patch14_224", 28, SMALL, norm="blocks.#.norm# fc_norm"),
    Family("eva02_base_patch14_224", 28, SMALL, norm="blocks.#.norm# fc_norm"),
    Family("eva_giant_patch14_224", 28, SMALL, norm="blocks.#.norm# fc_norm"),
    Family("beit_base_patch16_224", 32, SMALL, position="", norm="blocks.#.norm# fc_norm"),
    Family("beitv2_base_patch16_224", 32, SMALL, position="", norm="blocks.#.norm# fc_norm"),
    Family("cait_xxs24_224", 32, {**SMALL, "depth_token_only": 1},
           attention="blocks.#.attn.* blocks_token_only.#.attn.*",
           ffn="blocks.#.mlp.* blocks_token_only.#.mlp.*", norm="blocks.#.norm# blocks_token_only.#.norm# norm"),
    Family("convit_tiny", 32, {**SMALL, "depth": 2, "local_up_to_layer": 1}),
    Family("xcit_nano_12_p16_224", 32, {**SMALL, "cls_attn_layers": 1}, position="",
           attention="blocks.#.attn.* cls_attn_blocks.#.attn.*", ffn="blocks.#.mlp.* cls_attn_blocks.#.mlp.*",
           norm="blocks.#.norm# blocks.#.local_mp.bn cls_attn_blocks.#.norm# norm", batch_norm=True),
    Family("tnt_s_patch16_224", 32, {"depth": 1, "embed_dim": 32, "inner_dim": 8, "num_heads_outer": 2,
                                     "num_heads_inner": 2},
           attention="blocks.#.attn_in.* blocks.#.attn_out.*", ffn="blocks.#.mlp_in.* blocks.#.mlp.*",
           position="patch_pos pixel_pos", stem="pixel_embed.*",
           norm="norm#_proj blocks.#.norm_in blocks.#.norm_mlp_in blocks.#.norm#_proj blocks.#.norm_out "
                "blocks.#.norm_mlp norm"),
    Family("crossvit_9_240", 48, {"embed_dim": [16, 32], "num_heads": [2, 2], "depth": [[1, 1, 0]],
                                  "img_scale": [1.0, 1.0]},
           attention="blocks.#.blocks.#.#.attn.* blocks.#.fusion.#.attn.*", ffn="blocks.#.blocks.#.#.mlp.*",
           head="head.#", position="pos_embed_#",
           norm="blocks.#.blocks.#.#.norm# blocks.0.projs.[01].0 blocks.#.fusion.#.norm# "
                "blocks.0.revert_projs.[01].0 norm.#"),
    Family("pit_ti_224", 32, {"depth": [1, 1], "base_dims": [16, 16], "heads": [1, 2], "patch_size": 8, "stride": 4},
           attention="transformers.#.blocks.#.attn.*", ffn="transformers.#.blocks.#.mlp.*",
           norm="transformers.#.blocks.#.norm# norm"),
    Family("pit_ti_distilled_224", 32,
           {"depth": [1, 1], "base_dims": [16, 16], "heads": [1, 2], "patch_size": 8, "stride": 4},
           attention="transformers.#.blocks.#.attn.*", ffn="transformers.#.blocks.#.mlp.*", head="head head_dist",
           norm="transformers.#.blocks.#.norm# norm"),
    Family("swin_tiny_patch4_window7_224", 32,
           {"depths": [1, 1], "embed_dim": 16, "num_heads": [1, 2], "window_size": 4}, **_STAGES),
    Family("swinv2_tiny_window8_256", 32,
           {"depths": [1, 1], "embed_dim": 16, "num_heads": [1, 2], "window_size": 4}, **_STAGES),
    Family("swinv2_cr_tiny_224", 32, {"depths": [1, 1], "embed_dim": 16, "num_heads": [1, 2]}, head="head.fc",
           attention="stages.#.blocks.#.attn.*", ffn="stages.#.blocks.#.mlp.*", position="",
           norm="stages.#.blocks.#.norm# stages.#.downsample.norm"),
    Family("twins_pcpvt_small", 32, {"depths": [1, 1, 1, 1], "embed_dims": [16, 16, 16, 16],
                                     "num_heads": [1, 1, 1, 1]},
           attention="blocks.#.#.attn.*", ffn="blocks.#.#.mlp.*", position="", stem="patch_embeds.0.*",
           norm="patch_embeds.[123].norm blocks.#.#.norm# norm"),
    Family("twins_svt_small", 32, {"depths": [1, 2, 1, 1], "embed_dims": [16, 16, 16, 16],
                                   "num_heads": [1, 1, 1, 1], "wss": [4, 2, 2, 1]},
           attention="blocks.#.#.attn.*", ffn="blocks.#.#.mlp.*", position="", stem="patch_embeds.0.*",
           norm="patch_embeds.[123].norm blocks.#.#.norm# norm"),
    Family("levit_128s", 64, {"embed_dim": [16, 32, 32], "key_dim": 8, "num_heads": [1, 2, 2], "depth": [1, 1, 1]},
           **_LEVIT),
    Family("levit_conv_128s", 64, {"embed_dim": [16, 32, 32], "key_dim": 8, "num_heads": [1, 2, 2],
                                   "depth": [1, 1, 1]}, **_LEVIT),
    Family("maxvit_rmlp_pico_rw_256", 64, {"embed_dim": [32, 32], "depths": [1, 1], "stem_width": 8},
           norm=f"{_CONV_NORMS} stages.#.blocks.#.attn_block.norm# stages.#.blocks.#.attn_grid.norm# norm",
           **_PARTITION),
    Family("maxvit_tiny_tf_224", 64, {"embed_dim": [32, 32], "depths": [1, 1], "stem_width": 8},
           norm=f"{_CONV_NORMS} stages.#.blocks.#.attn_block.norm# stages.#.blocks.#.attn_grid.norm# head.norm",
           **_PARTITION),
    Family("coatnet_pico_rw_224", 64, {"embed_dim": [32, 32, 32, 32], "depths": [1, 1, 1, 1], "stem_width": 8},
           **_COATNET),
    Family("coatnet_rmlp_nano_rw_224", 64, {"embed_dim": [32, 32, 32, 32], "depths": [1, 1, 1, 1], "stem_width": 8},
           **_COATNET),
    Family("mobilevit_xxs", 64,
           norm="stages.#.#.conv#_#x#.bn stages.#.#.conv#_kxk.bn stages.#.#.conv_kxk.bn stages.#.#.transformer.#.norm# "
                "stages.#.#.norm stages.#.#.conv_proj.bn stages.#.#.conv_fusion.bn final_conv.bn", **_MOBILE),
    Family("mobilevitv2_050", 64,
           norm="stages.#.#.conv#_#x#.bn stages.#.#.conv#_kxk.bn stages.#.#.conv_kxk.bn stages.#.#.transformer.#.norm# "
                "stages.#.#.norm stages.#.#.conv_proj.bn", **_MOBILE),
    Family("hiera_tiny_224", 64, {"embed_dim": 16, "num_heads": 1, "stages": [1, 1, 1, 1]}, head="head.fc",
           norm="blocks.#.norm# head.norm"),
    Family("tiny_nest", 64, attention="levels.#.transformer_encoder.#.attn.*",
           ffn="levels.#.transformer_encoder.#.mlp.*", position="levels.#.pos_embed",
           norm="levels.#.transformer_encoder.#.norm# levels.#.pool.norm norm"),
    Family("davit_tiny", 32, {"depths": [1, 1], "embed_dims": [16, 32], "num_heads": [1, 2], "window_size": 4},
           attention="stages.#.blocks.#.#.attn.*", ffn="stages.#.blocks.#.#.mlp.*", head="head.fc", position="",
           stem="stem.*", norm="stages.#.blocks.#.#.norm# stages.#.downsample.norm head.norm"),
    Family("tiny_gcvit", 64, attention="stages.#.blocks.#.attn.*", ffn="stages.#.blocks.#.mlp.*", head="head.fc",
           position="", stem="stem.*", norm="stages.#.blocks.#.norm# stages.#.downsample.norm# stages.#.norm"),
    Family("tiny_volo", 64, attention="network.#.#.attn.* post_network.#.attn.*",
           ffn="network.#.#.mlp.* post_network.#.mlp.*", head="head aux_head",
           norm="network.#.#.norm# post_network.#.norm# norm", batch_norm=True),
    Family("coat_lite_tiny", 32, {"embed_dims": [16, 16, 16, 16], "serial_depths": [1, 1, 1, 1]},
           attention="crpe#.conv_list.# serial_blocks#.#.factoratt_crpe.*", ffn="serial_blocks#.#.mlp.*", position="",
           stem="patch_embed1.*", norm="patch_embed[234].norm serial_blocks#.#.norm# norm#"),
    Family("tiny_mvit", 64, attention="stages.#.blocks.#.attn.*", ffn="stages.#.blocks.#.mlp.*", head="head.fc",
           position="", norm="stages.#.blocks.#.norm# norm", fixed=True),
    Family("pvt_v2_b0", 32, {"depths": [1, 1, 1, 1], "embed_dims": [16, 16, 16, 16], "num_heads": [1, 1, 1, 1]},
           attention="stages.#.blocks.#.attn.*", ffn="stages.#.blocks.#.mlp.*", position="",
           norm="stages.#.blocks.#.norm# stages.#.norm stages.#.downsample.norm"),
    Family("tiny_vit_5m_224", 64, {"embed_dims": [16, 32, 32, 32], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1],
                                   "window_sizes": [4, 4, 4, 2]},
           attention="stages.#.blocks.#.attn.*", ffn="stages.#.blocks.#.mlp.*", head="head.fc", position="",
           norm="stages.#.blocks.#.conv#.bn stages.#.downsample.conv#.bn stages.#.blocks.#.local_conv.bn head.norm",
           batch_norm=True),
    Family("visformer_tiny", 64, {"depth": [1, 1, 1], "embed_dim": 48, "num_heads": 2, "init_channels": 8},
           attention="stage#.#.attn.*", ffn="stage#.#.mlp.*", position="pos_embed#", stem="stem.*",
           norm="patch_embed#.norm stage#.#.norm# norm", batch_norm=True),
    Family("tiny_caformer", 32, attention="stages.#.blocks.#.token_mixer.qkv stages.#.blocks.#.token_mixer.proj",
           ffn="stages.#.blocks.#.mlp.*", head="head.fc.fc2", position="", stem="stem.*",
           norm="stages.#.blocks.#.norm# stages.#.downsample.norm head.norm head.fc.norm"),
    Family("efficientformerv2_s0", 64, {"depths": [1, 1, 1, 1], "embed_dims": [16, 16, 16, 32]},
           attention="stages.#.blocks.#.token_mixer.* stages.#.downsample.attn.*", ffn="stages.#.blocks.#.mlp.*",
           head="head head_dist", position="", stem="stem.*", norm="stages.#.downsample.conv.bn norm",
           batch_norm=True, fixed=True),
]  # fmt: skip

REFUSED = {
    "mixer_s32_224": "has no attention weights",
    "resnet18": "has no attention weights",
    "seresnet18": "has no attention weights",
    "mambaout_femto": "has no attention weights",
    "poolformer_s12": "has no attention weights",
    "efficientvim_m1": "has no attention weights",
    "vit_base_patch16_xp_224": r"blocks\.0 is a ParallelScalingBlock, whose `in_proj` holds rows of the FFN",
    "vit_pwee_patch16_reg1_gap_256": r"blocks\.0 is a ParallelScalingBlock, whose `in_proj` holds rows of the FFN",
}
