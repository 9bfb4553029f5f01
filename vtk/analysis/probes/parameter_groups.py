"""Groups of parameters whose diagonal blocks of the Hessian are compared (Chen et al. 2022, Table 4)."""

from torch import nn

from vtk.analysis.probes.attention_maps import looks_like_attention
from vtk.analysis.probes.depth_points import block_modules

_EMBEDDING = (
    "patch_embed", "stem", "conv1", "bn1", "norm_pre", "pos_embed", "cls_token", "reg_token", "dist_token",
)  # fmt: skip
_MSA = ("norm1", "attn", "ls1", "attns")
_MLP = ("norm2", "mlp", "ls2", "ffns")
_TOKEN_MLP = ("norm1", "mlp_tokens", "ls1")
_CHANNEL_MLP = ("norm2", "mlp_channels", "ls2")
Group = dict[str, nn.Parameter]


def parameter_blocks(model: nn.Module) -> dict[str, Group]:
    """Return groups of parameters by name: ``whole``, ``embedding``, ``msa``, ``mlp``, ``block 1``, ``block 2``, ….

    ``msa`` and ``mlp`` are those of all blocks, each with the norm before it; ``token mlp`` is what an MLP-Mixer has in
    place of attention. Every block counts with all its parameters. Groups that a model does not have are left out.
    """
    named = dict(model.named_parameters())
    groups: dict[str, Group] = {
        "whole": named,
        "embedding": {n: p for n, p in named.items() if n.partition(".")[0] in _EMBEDDING},
        "msa": {}, "token mlp": {}, "mlp": {},
    }  # fmt: skip
    for number, (name, block) in enumerate(block_modules(model).items(), start=1):
        children = dict(block.named_children())
        if "mlp_tokens" in children:
            parts: dict[str, tuple[str, ...]] = {"token mlp": _TOKEN_MLP, "mlp": _CHANNEL_MLP}
        elif any(looks_like_attention(module) for module in block.modules()):
            parts = {"msa": _MSA, "mlp": _MLP}
        else:
            parts = {}
        own = {n: p for n, p in named.items() if n.startswith(f"{name}.")}
        for group, members in parts.items():
            groups[group] |= {n: p for n, p in own.items() if n[len(name) + 1 :].partition(".")[0] in members}
        groups[f"block {number}"] = own
    return {name: group for name, group in groups.items() if group}
