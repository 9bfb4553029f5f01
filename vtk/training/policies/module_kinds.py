"""Classes of attention, FFN, norm and stem modules.

Names of tensors cannot tell: deit calls its second branch ``attn1``, a ResNet calls its squeeze-and-excitation block
``attn``, and ``patch_embed.proj`` ends like ``attn.proj``. So classes are listed here, by module and name, since timm's
versions differ in which of them exist.
"""

import importlib
from collections.abc import Iterable

from torch import nn

from vtk.errors import UsageError

_ATTENTION = {
    "timm.layers.attention": "Attention AttentionRope",
    "timm.layers.attention2d": "MultiQueryAttentionV2 MultiQueryAttention2d Attention2d",
    "timm.layers.attention_pool": "AttentionPoolLatent AttentionPoolPrr",
    "timm.layers.attention_pool2d": "RotAttentionPool2d AttentionPool2d",
    "timm.layers.diff_attention": "DiffAttention",
    "timm.layers.bottleneck_attn": "BottleneckAttn",
    "timm.layers.halo_attn": "HaloAttn",
    # tables of relative positions that some models share between blocks, outside the attention module
    "timm.layers.pos_embed_rel": "RelPosBias RelPosMlp RelPosBiasTf",
    # trained frequencies of every block's queries and keys; the other rotary embeddings have no parameters
    "timm.layers.pos_embed_sincos": "RotaryEmbeddingMixed",
    "timm.models.beit": "Attention RelativePositionBias",
    "timm.models.cait": "ClassAttn TalkingHeadAttn",
    "timm.models.coat": "FactorAttnConvRelPosEnc ConvRelPosEnc",
    "timm.models.convit": "GPSA MHSA",
    "timm.models.cpubone": "ConvAttention",
    "timm.models.crossvit": "CrossAttention",
    "timm.models.davit": "ChannelAttention ChannelAttentionV2 WindowAttention",
    "timm.models.edgenext": "CrossCovarianceAttn",
    "timm.models.efficientformer": "Attention",
    "timm.models.efficientformer_v2": "Attention2d Attention2dDownsample",
    "timm.models.efficientvit_mit": "LiteMLA",
    "timm.models.efficientvit_msra": "CascadedGroupAttention",
    "timm.models.eva": "EvaAttention",
    "timm.models.fastvit": "Attention",
    "timm.models.gcvit": "WindowAttentionGlobal",
    "timm.models.gemma4_vit": "Gemma4Attention",
    "timm.models.hiera": "MaskUnitAttention",
    "timm.models.hieradet_sam2": "MultiScaleAttention",
    "timm.models.iformer": "SHMA",
    "timm.models.levit": "Attention AttentionDownsample",
    "timm.models.lowformer": "ConvAttention",
    "timm.models.maxxvit": "Attention2d AttentionCl",
    "timm.models.metaformer": "Attention",
    "timm.models.mobilevit": "LinearSelfAttention",
    "timm.models.mvitv2": "MultiScaleAttention MultiScaleAttentionPoolFirst",
    "timm.models.nest": "Attention",
    "timm.models.nextvit": "ConvAttention EfficientAttention",
    "timm.models.pvt_v2": "Attention",
    "timm.models.shvit": "SHSA",
    "timm.models.swiftformer": "EfficientAdditiveAttention",
    "timm.models.swin_transformer": "WindowAttention",
    "timm.models.swin_transformer_v2": "WindowAttention",
    "timm.models.swin_transformer_v2_cr": "WindowMultiHeadAttention",
    "timm.models.tiny_vit": "Attention",
    "timm.models.tnt": "Attention",
    "timm.models.twins": "LocallyGroupedAttn GlobalSubSampleAttn",
    "timm.models.vision_transformer_relpos": "RelPosAttention",
    "timm.models.vision_transformer_sam": "Attention",
    "timm.models.visformer": "Attention",
    "timm.models.volo": "OutlookAttention Attention ClassAttention",
    "timm.models.xcit": "XCA",
    "torch.nn": "MultiheadAttention",
    "vtk.models.alternet.window_attention": "WindowAttention",
}
_FFN = {
    "timm.layers.mlp": "Mlp GluMlp SwiGLU GatedMlp ConvMlp GlobalResponseNormMlp",
    "timm.models.efficientformer": "ConvMlpWithNorm",
    "timm.models.efficientformer_v2": "ConvMlpWithNorm",
    "timm.models.efficientvim": "FFN",
    "timm.models.efficientvit_msra": "ConvMlp",
    "timm.models.fastvit": "ConvMlp",
    "timm.models.gemma4_vit": "Gemma4GatedMlp",
    "timm.models.iformer": "FFN",
    "timm.models.levit": "LevitMlp",
    "timm.models.pvt_v2": "MlpWithDepthwiseConv",
    "timm.models.repvit": "RepVitMlp",
    "timm.models.shvit": "FFN",
    "timm.models.swiftformer": "Mlp",
    "timm.models.tiny_vit": "NormMlp",
    "timm.models.visformer": "SpatialMlp",
    "timm.models.vitamin": "GeGluMlp",
}
_NORM = {
    "torch.nn": "LayerNorm GroupNorm RMSNorm BatchNorm1d BatchNorm2d SyncBatchNorm",
    "timm.layers.norm": (
        "RmsNorm RmsNormFp32 RmsNorm2d RmsNorm2dFp32 SimpleNorm SimpleNormFp32 SimpleNorm2d SimpleNorm2dFp32"
    ),
    "timm.layers.norm_act": "FrozenBatchNormAct2d",
}
_STEM = {
    "timm.layers.patch_embed": "PatchEmbed PatchEmbedResamplerFixedOrigSize PatchEmbedInterpolator",
    "timm.layers.hybrid_embed": "HybridEmbed",
    "timm.models.crossvit": "PatchEmbed",
    "timm.models.hiera": "PatchEmbed",
    "timm.models.naflexvit": "NaFlexEmbeds",
    "timm.models.tnt": "PixelEmbed",
    "timm.models.twins": "PatchEmbed",
    "timm.models.volo": "PatchEmbed",
    "timm.models.xcit": "ConvPatchEmbed",
}
# one matrix holds rows of the FFN and of q, k and v (ViT-22B): neither can be trained without the other
_MIXED = {"timm.models.vision_transformer": "ParallelScalingBlock DiffParallelScalingBlock"}

_registered: list[type[nn.Module]] = []


def _resolve(table: dict[str, str]) -> tuple[type[nn.Module], ...]:
    classes = []
    for module_name, names in table.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # an older or newer timm without this family
            continue
        classes += [getattr(module, name) for name in names.split() if hasattr(module, name)]
    return tuple(classes)


def attention_types() -> tuple[type[nn.Module], ...]:
    """Return the classes whose parameters count as attention; a subclass counts too."""
    return _resolve(_ATTENTION) + tuple(_registered)


def ffn_types() -> tuple[type[nn.Module], ...]:
    """Return the classes whose parameters count as FFN."""
    return _resolve(_FFN)


def norm_types() -> tuple[type[nn.Module], ...]:
    """Return the normalisation classes."""
    return _resolve(_NORM)


def stem_types() -> tuple[type[nn.Module], ...]:
    """Return the classes that turn an image into tokens."""
    return _resolve(_STEM)


def mixed_types() -> tuple[type[nn.Module], ...]:
    """Return the block classes in which attention and FFN share a matrix."""
    return _resolve(_MIXED)


def register_attention(*types: type[nn.Module]) -> None:
    """Make classes of your own count as attention in every policy."""
    _registered.extend(t for t in types if t not in _registered)


def refuse_mixed(model: nn.Module) -> None:
    """Refuse a model in which attention and FFN share matrices.

    Raises:
        UsageError: names the block and its class.
    """
    mixed = mixed_types()
    for name, module in model.named_modules():
        if isinstance(module, mixed):
            raise UsageError(
                f"{name} is a {type(module).__name__}, whose `in_proj` holds rows of the FFN and of attention in one "
                "matrix, so neither can be trained alone; use --train full or head, or a model without such blocks"
            )


def refuse_unknown(model: nn.Module, known: Iterable[type[nn.Module]]) -> None:
    """Refuse a model with a module that looks like attention and is in no list, rather than freeze it silently.

    Raises:
        UsageError: names the module and its class.
    """
    known = tuple(known)
    inside: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, known):
            inside.add(name)
    for name, module in model.named_modules():
        parents = {name.rsplit(".", i)[0] for i in range(name.count(".") + 1)}
        covered = parents & inside or any(k == name or k.startswith(f"{name}.") for k in inside)
        own_linear = any(isinstance(m, (nn.Linear, nn.Conv2d)) for m in module.children())
        if isinstance(getattr(module, "num_heads", None), int) and own_linear and not covered:
            raise UsageError(
                f"{name} ({type(module).__module__}.{type(module).__name__}) looks like attention but is not a class "
                "vtk knows; call vtk.training.register_attention with it, or use --train full or head"
            )
