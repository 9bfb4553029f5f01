"""Every model and transform of the papers, small, with its parameters sorted and its refusals written down by hand.

A pattern is a shell pattern for a parameter's name without ``.weight`` or ``.bias``; ``#`` is any number. Every
parameter must be in exactly one group: there is no group for the rest.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from timm.models import mlp_mixer, register_model, volo
from torch import nn

from vtk.card import Transform
from vtk.models.create import Created, build_model
from vtk.models.stems import STEMS
from vtk.models.stems.names import LOCAL

GROUPS = ("attention", "head", "position", "stem", "ffn", "norm", "context", "other")
VIT = {
    "attention": "blocks.#.attn.*", "ffn": "blocks.#.mlp.*", "norm": "blocks.#.norm# norm", "stem": "patch_embed.*",
    "head": "head", "position": "pos_embed", "other": "cls_token",
}  # fmt: skip
GAP = {**VIT, "other": ""}
PARALLEL = {
    **VIT, "attention": "blocks.#.attns.#.attn.*", "ffn": "blocks.#.ffns.#.mlp.*",
    "norm": "blocks.#.attns.#.norm blocks.#.ffns.#.norm norm",
}  # fmt: skip
RESNET = {
    "head": "head.fc", "norm": "stages.#.blocks.#.norm# norm", "stem": "stem.conv",
    "other": "stages.#.blocks.#.conv# stages.#.blocks.#.downsample.conv",
}  # fmt: skip
ALTERNET = {**RESNET, "attention": "stages.#.blocks.#.attn.*"}
MIXER = {
    "ffn": "blocks.#.mlp_tokens.* blocks.#.mlp_channels.fc#", "norm": "blocks.#.norm# norm", "stem": "stem.proj",
    "head": "head",
}  # fmt: skip
PIT = {
    "attention": "transformers.#.blocks.#.attn.*", "ffn": "transformers.#.blocks.#.mlp.fc#",
    "norm": "transformers.#.blocks.#.norm# norm", "stem": "patch_embed.*", "head": "head", "position": "pos_embed",
    "other": "cls_token transformers.#.pool.*",
}  # fmt: skip

VOLO = {
    "attention": "network.#.#.attn.* post_network.#.attn.*", "ffn": "network.#.#.mlp.* post_network.#.mlp.*",
    "norm": "network.#.#.norm# post_network.#.norm# norm", "stem": "patch_embed.*", "head": "head aux_head",
    "position": "pos_embed", "other": "cls_token network.#.proj",
}  # fmt: skip

_SMALL_VIT = {"depth": 2, "embed_dim": 32, "num_heads": 2}
_SMALL_NET = {"channels": [8, 16, 24, 32], "stem_chs": 8, "heads": [1, 1, 2, 2], "head_dim": 4}


@register_model
def tiny_mixer(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """MLP-Mixer of two blocks; timm's entry points take no sizes."""
    small = {"num_blocks": 2, "embed_dim": 32, "patch_size": 8}
    return mlp_mixer._create_mixer("mixer_s32_224", pretrained=pretrained, **{**small, **kwargs})


@register_model
def small_volo(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """VOLO of three blocks and two of class attention; timm's entry points take no sizes."""
    small = {
        "layers": (1, 1, 1), "embed_dims": (16, 32, 32), "num_heads": (2, 4, 4), "downsamples": (True, False, False),
        "outlook_attention": (True, False, False),
    }  # fmt: skip
    return volo._create_volo("volo_d1_224", pretrained=pretrained, **{**small, **kwargs})


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        id: of the test.
        model: timm name.
        kwargs: that make it small.
        transforms: made after the base was loaded.
        size: pixels.
        groups: patterns by group.
        fuse: what the refusal says; None where the fused model must give the same logits.
        pack: what a packed pass says; None where a packed pass must give the same tokens, "" where the model is
            none of its kind.
        attention: whether ``--train attn`` can train it.
    """

    id: str
    model: str
    kwargs: dict[str, Any]
    groups: dict[str, str]
    transforms: tuple[Transform, ...] = ()
    size: int = 32
    fuse: str | None = None
    pack: str | None = None
    attention: bool = True

    def make(self) -> Created:
        """Create it with every parameter moved away from where training starts, in eval mode.

        Zeros would hide mistakes: a Λ or an added head of 0 does nothing, whatever it is.
        """
        created = build_model(
            self.model, num_classes=3, img_size=self.size, pretrained=False, transforms=self.transforms,
            kwargs=self.kwargs,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in created.model.parameters():
                p += 0.05 * torch.randn(p.shape, generator=generator)
            for name, b in created.model.named_buffers():
                if name.endswith("running_mean"):
                    b += 0.1 * torch.randn(b.shape, generator=generator)
                elif name.endswith("running_var"):
                    b *= 1 + 0.2 * torch.rand(b.shape, generator=generator)
        created.model.eval()
        return created

    def group(self, name: str) -> str:
        """Return the group of a parameter, exactly one."""
        taken = [g for g in GROUPS if any(_matches(name, p) for p in self.groups.get(g, "").split())]
        assert len(taken) == 1, f"{self.id}: {name} is {' and '.join(taken) or 'in no group'}"
        return taken[0]

    def unused(self, model: nn.Module) -> list[str]:
        """Return the patterns that take no parameter."""
        names = [name for name, _ in model.named_parameters()]
        patterns = [p for g in GROUPS for p in self.groups.get(g, "").split()]
        return [p for p in patterns if not any(_matches(n, p) for n in names)]


def _matches(name: str, pattern: str) -> bool:
    short = re.sub(r"\.(weight|bias)$", "", name)
    return fnmatchcase(re.sub(r"\d+", "#", short) if "#" in pattern else short, pattern)


def _vit(id: str, *ops: tuple[str, dict[str, Any]], groups: dict[str, str] = VIT, **more: Any) -> Case:
    transforms = tuple(Transform(op, arguments) for op, arguments in ops)
    name = more.pop("model", "vit_tiny_patch16_224")
    return Case(id, name, {**_SMALL_VIT, **more.pop("kwargs", {})}, groups, transforms, **more)


def _net(id: str, model: str, groups: dict[str, str] = ALTERNET, kind: str = "AlterNet", **more: Any) -> Case:
    kwargs = {**_SMALL_NET, **more.pop("kwargs", {})}
    return Case(
        id, model, kwargs, groups, fuse=f"cannot fuse {kind}: only timm's VisionTransformer", pack="",
        attention="attention" in groups, **more,
    )  # fmt: skip


def _only(kind: str, *parts: str) -> str:
    return rf"blocks\.0\.({'|'.join(parts)}).*{kind}"


_CONTEXT = {"context": "blocks.#.mlp.cb.scale", "ffn": "blocks.#.mlp.fc#"}
_CB, _CB_S = ("add_context_broadcast", {}), ("add_context_broadcast", {"scale": True})
_LOCAL = ("local_attention", {"kernel": 3})
_GAP_2 = {"model": "vit_tiny_patch2_gap_32", "size": 8, "groups": GAP}
_ATTN, _MLP = ("attn", r"attns\.0\.attn"), ("mlp", r"ffns\.0\.mlp")

CASES = [
    _net("alternet-18", "alternet_18", kwargs={"window_size": 2}, size=64),
    _net(
        "alternet-50", "alternet_50", kwargs={"window_size": 2, "layers": [1, 2, 2, 2], "msa_blocks": 3}, size=64
    ),
    _net("alternet-18-cifar", "alternet_18_cifar"),
    _net("alternet-50-cifar", "alternet_50_cifar", kwargs={"layers": [1, 2, 2, 4]}),
    _net("alternet-50-cifar-6", "alternet_50_cifar", kwargs={"msa_blocks": 6}),
    _net("preact-resnet-18", "preact_resnet_18_cifar", groups=RESNET),
    _net("alternet-smoothing", "alternet_18_cifar", transforms=(Transform("add_smoothing", {}),)),
    _net(
        "preact-resnet-tanh-smoothing", "preact_resnet_18_cifar", groups=RESNET,
        transforms=(Transform("add_smoothing", {"kind": "tanh-blur"}),),
    ),
    _net("preact-resnet-50", "preact_resnet_50", groups=RESNET, kwargs={"layers": [1, 1, 2, 1]}),
    Case(
        "built-up-resnet", "resnetv2_18", {"channels": [8, 16, 24, 32], "stem_chs": 8}, ALTERNET,
        (Transform("build_up", {"msa_blocks": [0, 1, 1, 0], "window_size": 2, "head_dim": 4}),),
        fuse="cannot fuse ResNetV2", pack="",
    ),
    _vit("vit-class-token", model="vit_tiny_patch2_32", size=8),
    _vit("vit-gap", **_GAP_2),
    _vit("vit-local", _LOCAL, **_GAP_2, fuse=_only("LocalAttention", *_ATTN), pack=_only("LocalAttention", *_ATTN)),
    _vit(
        "vit-local-class-token", _LOCAL, model="vit_tiny_patch2_32", size=8,
        fuse=_only("LocalAttention", *_ATTN), pack=_only("LocalAttention", *_ATTN),
    ),
    _vit(
        "vit-local-parallel-cb", ("parallelize", {"branches": 2}), _LOCAL, ("add_context_broadcast", {"on": "both"}),
        model="vit_tiny_patch2_32", size=8, groups=PARALLEL,
        fuse=_only("LocalAttention", *_ATTN), pack=_only("LocalAttention", *_ATTN),
    ),
    *(
        _vit(
            f"uniform-{v}", ("uniform_heads", {"variant": v, "mix": mix}),
            fuse=_only("UniformHeadAttention", *_ATTN), pack=_only("UniformHeadAttention", *_ATTN),
        )
        for v, mix in (("a", "uniform"), ("b", "cb"), ("c", "uniform"))
    ),
    _vit(
        "softmax-free", ("softmax_free", {}),
        fuse=_only("SoftmaxFreeAttention", *_ATTN), pack=_only("SoftmaxFreeAttention", *_ATTN),
    ),
    _vit(
        "se", ("add_squeeze_excite", {"reduction": 4}),
        fuse=_only("SqueezeExciteMlp", *_MLP), pack=_only("SqueezeExciteMlp", *_MLP),
    ),
    _vit(
        "se-cb", ("add_squeeze_excite", {"reduction": 4}), _CB,
        fuse=_only("SqueezeExciteMlp", *_MLP), pack=_only("SqueezeExciteMlp", *_MLP),
    ),
    _vit("extra-msa", ("add_block", {"kind": "msa"}), groups={**VIT, "norm": "blocks.#.norm# blocks.#.norm norm"}),
    _vit("extra-mlp", ("add_block", {"kind": "mlp"}), groups={**VIT, "norm": "blocks.#.norm# blocks.#.norm norm"}),
    _vit(
        "parallel-extra-mlp-cb", ("parallelize", {"branches": 2}), _CB, ("add_block", {"kind": "mlp"}),
        groups={**PARALLEL, "ffn": "blocks.#.ffns.#.mlp.* blocks.#.mlp.*", "norm": PARALLEL["norm"] + " blocks.#.norm"},
    ),
    _vit("cb", _CB),
    _vit("cb-scale", _CB_S, groups={**VIT, **_CONTEXT}),
    *(
        Case(
            f"mixer-{op}", "tiny_mixer", {}, groups,
            (Transform(*change),), fuse="cannot fuse MlpMixer", pack="", attention=False,
        )
        for op, change, groups in (
            ("cb", _CB, MIXER), ("cb-scale", _CB_S, {**MIXER, "context": "blocks.#.mlp_channels.cb.scale"})
        )
    ),
    *(
        Case(
            f"pit-{op}", "pit_ti_224",
            {"depth": [1, 1], "base_dims": [16, 16], "heads": [1, 2], "patch_size": 8, "stride": 4}, groups,
            (Transform(*change),), fuse="cannot fuse PoolingVisionTransformer", pack="",
        )
        for op, change, groups in (
            ("cb", _CB, PIT), ("cb-scale", _CB_S, {**PIT, "context": "transformers.#.blocks.#.mlp.cb.scale"})
        )
    ),
    *(
        Case(
            f"volo-{id}", "small_volo", {}, VOLO, tuple(Transform(*op) for op in ops), fuse="cannot fuse VOLO", pack=""
        )
        for id, ops in {
            "1proj+1bn+1relu": (("replace_stem", {"stem": "1proj+1bn+1relu"}),),
            "gelu-mlp-bn": (("replace_stem", {"stem": "conv", "act": "gelu"}), ("change_mlp", {"design": "bn"})),
        }.items()
    ),
    _vit(
        "lvvit", model="lvvit_small", kwargs={"patch_size": 8}, fuse="cannot fuse LvVit",
        groups={**VIT, "head": "head aux_head"}, pack=r"`blocks\.0` is a ScaledResidualBlock",
    ),
    *(
        _vit(f"stem-{stem}", ("replace_stem", {"stem": stem, **({"depth": 2} if stem == LOCAL else {})}))
        for stem in STEMS
    ),
    _vit("parallel-transform", ("parallelize", {"branches": 2}), groups=PARALLEL),
    _vit(
        "parallel-name", model="vit_tiny_patch16_6x2_224", kwargs={"depth": 1},
        groups={**PARALLEL, "other": "cls_token blocks.#.attns.#.ls.gamma blocks.#.ffns.#.ls.gamma"},
    ),
    _vit(
        "parallel-hmlp-cb", ("replace_stem", {"stem": "hmlp"}), ("parallelize", {"branches": 2}), _CB_S,
        groups={**PARALLEL, "context": "blocks.#.cb.scale"},
    ),
    _vit("mlp-relu", ("change_mlp", {"design": "relu"})),
    _vit("mlp-bn", ("change_mlp", {"design": "bn"}), pack=_only("TokenBatchNormAct", *_MLP)),
    _vit("mlp-no-norm", ("change_mlp", {"design": "no-norm"}), fuse=r"`blocks\.0\.norm2` \(Identity\)"),
]  # fmt: skip
BY_ID = {case.id: case for case in CASES}
