"""Policies: select the parameters that a fine-tuning run trains, by module type."""

from collections.abc import Collection, Mapping
from typing import Literal

from torch import nn

from vtk.errors import UsageError
from vtk.models.task_parameters import head_names, position_names
from vtk.models.transforms.context_broadcast import ContextBroadcast
from vtk.training.options.policy import PolicyName
from vtk.training.policies import module_kinds as kinds

Group = Literal["attention", "lora", "head", "position", "stem", "ffn", "norm", "context", "other"]
GROUPS: tuple[Group, ...] = ("attention", "lora", "head", "position", "stem", "ffn", "norm", "context", "other")

_TRAINS: dict[str, tuple[Group, ...]] = {
    "attn": ("attention", "head", "position", "context"),
    "attn+norm": ("attention", "norm", "head", "position", "context"),
    "ffn": ("ffn", "head", "context"),
    "lora": ("lora", "head", "context"),
    "head": ("head", "context"),
    "full": GROUPS,
}
_TOKENS = frozenset({"cls_token", "reg_token", "dist_token", "mask_token"})


def attention_types() -> tuple[type[nn.Module], ...]:
    """Return the module classes whose parameters count as attention."""
    return kinds.attention_types()


def group_names(model: nn.Module) -> dict[str, Group]:
    """Return the group of every parameter and buffer of ``model``, under its state-dict name.

    The stem is what turns an image into tokens; what merges tokens between stages, by a class that some families use
    for both, is not. Class and register tokens are "other" wherever a family keeps them.

    Inside an attention module everything is attention (qkv, proj, q and k norm, relative positions), with one
    exception: the latent attention pool carries a norm and an FFN of its own behind its projection, which stay what
    they are, so that "attention only" never trains an FFN. Context Broadcasting is a group of its own wherever it is,
    and so are the factors that PEFT's LoRA puts beside a layer.
    """
    attention, ffn, norm, stem = kinds.attention_types(), kinds.ffn_types(), kinds.norm_types(), kinds.stem_types()
    pools = tuple(t for t in attention if t.__name__ in ("AttentionPoolLatent", "AttentionPoolPrr"))
    stems = {id(m) for m in (getattr(model, "patch_embed", None), getattr(model, "stem", None)) if m is not None}
    channels = _input_channels(model)
    result: dict[str, Group] = {}

    def visit(module: nn.Module, prefix: str, group: Group, in_pool: bool) -> None:
        if isinstance(module, ContextBroadcast):
            group = "context"
        elif (id(module) in stems or isinstance(module, stem)) and _input_channels(module) in (channels, None):
            group = "stem"
        elif isinstance(module, attention):
            group = "attention"
        elif isinstance(module, ffn) and (group != "attention" or in_pool):
            group = "ffn"
        elif isinstance(module, norm) and (group == "other" or in_pool):
            group = "norm"
        for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            result[prefix + name] = "other" if name in _TOKENS and group == "stem" else group
        for name, child in module.named_children():
            # q_norm and k_norm act on the pool's attention; only its `norm` and `mlp` lie behind it
            behind = isinstance(module, pools) and name in ("norm", "mlp", "pre_norm", "post_norm")
            visit(child, f"{prefix}{name}.", group, behind)

    visit(model, "", "other", False)
    for name in position_names(model):
        if name in result:
            result[name] = "position"
    for name in head_names(model):
        if name in result:
            result[name] = "head"
    for name in result:
        if ".lora_A." in name or ".lora_B." in name:
            result[name] = "lora"
    return result


def _input_channels(module: nn.Module) -> int | None:
    """Return the input channels of the first convolution inside; None without one."""
    return next((m.in_channels for m in module.modules() if isinstance(m, nn.Conv2d)), None)


def created_names(key_map: Mapping[str, str | None], model: nn.Module) -> frozenset[str]:
    """Return the tensors that a transform made: they have no source in the base and are neither head nor position."""
    own = head_names(model) | position_names(model)
    return frozenset(key for key, source in key_map.items() if source is None and key not in own)


def select(model: nn.Module, policy: PolicyName, created: Collection[str] = ()) -> frozenset[str]:
    """Return the names of the parameters that ``policy`` trains; the model is not changed.

    Args:
        model: a timm model.
        policy: ``attn`` (every parameter of attention modules, the heads and the absolute position table),
            ``attn+norm``, ``ffn``, ``head``, ``full``, or ``lora`` (the factors in a model that has them); the head and
            the Λ of Context Broadcasting are always trained.
        created: names of tensors that a transform made, which every policy trains.

    Raises:
        UsageError: the model has no attention (or FFN) to train, has blocks that mix both in one matrix, or attention
            of a class that is not known.
    """
    if policy not in _TRAINS:
        raise UsageError(f"`--train` {policy} is not a policy of this version; choose {', '.join(_TRAINS)}")
    kind = type(model).__name__
    if policy in ("attn", "attn+norm", "ffn"):
        kinds.refuse_mixed(model)
    groups = group_names(model)
    parameters = dict(model.named_parameters())
    needs: dict[str, Group] = {"attn": "attention", "attn+norm": "attention", "ffn": "ffn", "lora": "lora"}
    wanted = needs.get(policy)
    if wanted == "attention":
        kinds.refuse_unknown(model, kinds.attention_types())
    if wanted and not any(groups[name] == wanted for name in parameters):
        what = {"attention": "attention", "lora": "LoRA"}.get(wanted, "FFN")
        raise UsageError(
            f"`--train` {policy}: {kind} has no {what} weights (squeeze-and-excitation and the like do not count); "
            "use a Vision Transformer, or --train full or head"
        )
    chosen = frozenset(n for n in parameters if groups[n] in _TRAINS[policy] or n in created)
    if not any(groups[name] == "head" for name in chosen):
        raise UsageError(f"{kind} has no classifier that could be trained; create it with num_classes above 0")
    return chosen


def apply(model: nn.Module, names: Collection[str]) -> None:
    """Make exactly the parameters in ``names`` trainable."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)


def aliases(model: nn.Module, names: Collection[str]) -> frozenset[str]:
    """Return ``names`` and the other state-dict keys of the same parameters: CoaT's blocks share one of positions."""
    every = list(model.named_parameters(remove_duplicate=False))
    ids = {id(p) for n, p in every if n in names}
    return frozenset(n for n, p in every if id(p) in ids)


def train_mode(model: nn.Module) -> None:
    """Put ``model`` in train mode, but leave frozen modules that hold buffers in eval mode.

    A BatchNorm in train mode changes its running statistics whether or not its weights are trained.
    """
    model.train()
    for module in model.modules():
        owns = any(True for _ in module.buffers(recurse=False))
        if owns and not any(p.requires_grad for p in module.parameters()):
            module.training = False


def live_buffers(model: nn.Module) -> frozenset[str]:
    """Return the buffers that training may change: those of modules that `train_mode` leaves in train mode."""
    names = set()
    for prefix, module in model.named_modules():
        if any(p.requires_grad for p in module.parameters()):
            names |= {f"{prefix}.{n}".lstrip(".") for n, _ in module.named_buffers(recurse=False)}
    return frozenset(names)
