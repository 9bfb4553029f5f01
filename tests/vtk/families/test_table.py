"""Which parameters of timm's families are what, which are trained, and which models are refused."""

import functools
import importlib
import inspect
import pkgutil

import pytest
import timm
import torch
from torch import nn

from tests.vtk.families._table import FAMILIES, REFUSED
from vtk.errors import UsageError
from vtk.models.create import build_model
from vtk.models.meta_model import shapes_only
from vtk.training.policies import module_kinds as kinds
from vtk.training.policies import policy
from vtk.training.policies.census import take_census

_MOVED = ("factory", "features", "fx_features", "helpers", "hub", "layers", "registry")  # old names of other modules


@functools.cache
def build(name: str) -> nn.Module:
    """Build a family without values; the same model each time: it is not changed."""
    family = next(f for f in FAMILIES if f.name == name)
    with shapes_only():
        try:
            return timm.create_model(name, num_classes=3, img_size=family.size, **family.kwargs)
        except TypeError:  # families that take any size have no argument for it
            return timm.create_model(name, num_classes=3, **family.kwargs)


def test_there_are_thirty_families_or_more():
    assert len({f.name for f in FAMILIES}) == len(FAMILIES) >= 45
    assert len({type(build(f.name)) for f in FAMILIES}) >= 30


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_every_parameter_is_what_it_is_by_hand(family):
    model = build(family.name)
    expected = {name: family.group(name) for name, _ in model.named_parameters()}
    assert not family.unused(model)
    found = policy.group_names(model)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_attention_alone_trains_attention_head_and_position(family):
    model = build(family.name)
    chosen = policy.select(model, "attn")
    by_hand = {name: family.group(name) for name, _ in model.named_parameters()}
    assert chosen == {name for name, group in by_hand.items() if group in ("attention", "head", "position")}
    rows = {row.group: row for row in take_census(model, chosen, "attn").rows}
    assert rows["attention"].trained and not rows["attention"].frozen
    for group in ("stem", "ffn", "norm", "other"):
        assert group not in rows or rows[group].trained == 0
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    for group, row in rows.items():
        assert row.trained + row.frozen == sum(sizes[n] for n, g in by_hand.items() if g == group)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_ffn_alone_trains_no_attention(family):
    model = build(family.name)
    expected = {n for n, _ in model.named_parameters() if family.group(n) in ("ffn", "head")}
    assert policy.select(model, "ffn") == expected


@pytest.mark.parametrize("name", REFUSED)
def test_models_without_attention_of_their_own_are_refused(name):
    with shapes_only():
        model = timm.create_model(name, num_classes=3)
    with pytest.raises(UsageError, match=REFUSED[name]) as caught:
        policy.select(model, "attn")
    assert "--train full or head" in str(caught.value) and "\n" not in str(caught.value)
    assert policy.select(model, "full") == {n for n, _ in model.named_parameters()}


def test_classes_that_timm_calls_attention_are_listed_or_said_not_to_be():
    """A new family in a newer timm must be looked at, not frozen in silence."""
    known = kinds.attention_types()
    seen = set()
    for entry in pkgutil.iter_modules(timm.models.__path__):
        if entry.name in _MOVED:
            continue
        module = importlib.import_module(f"timm.models.{entry.name}")
        for name, kind in vars(module).items():
            if inspect.isclass(kind) and issubclass(kind, nn.Module) and kind.__module__ == module.__name__:
                named = any(word in name.lower() for word in ("attn", "attention", "mhsa", "shsa", "shma", "litemla"))
                if named and not issubclass(kind, known):
                    seen.add(f"{entry.name}.{name}")
    assert seen == {
        "_efficientnet_blocks.MobileAttention",  # a block around the layers' attention
        "byobnet.SelfAttnBlock",
        "cait.LayerScaleBlockClassAttn",
        "crossvit.CrossAttentionBlock",
        "csatv2.SpatialAttention",  # a gate of one channel, as squeeze-and-excitation is one of one pixel
        "efficientvit_msra.LocalWindowAttention",  # windows around CascadedGroupAttention
        "fastvit.AttentionBlock",
        "iformer.SHMABlock",
        "maxxvit.ParallelPartitionAttention",
        "maxxvit.PartitionAttention2d",
        "maxxvit.PartitionAttentionCl",
        "xcit.ClassAttentionBlock",
    }


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_weights_of_another_size_fit_or_are_refused_by_the_size_that_fits(family):
    made = build_model(family.name, num_classes=3, img_size=family.size, pretrained=False, kwargs=family.kwargs)
    larger = 2 * family.size
    if family.fixed:
        with pytest.raises(UsageError, match=rf"depends on the size .* use --img-size {family.size} {family.size}$"):
            build_model(family.name, num_classes=3, img_size=larger, base=made.base, kwargs=family.kwargs)
        return
    other = build_model(family.name, num_classes=3, img_size=larger, base=made.base, kwargs=family.kwargs)
    assert None not in {other.key_map[n] for n, _ in other.model.named_parameters()}
    if family.position and family.position != "embeds.pos_embed":  # NaFlex resamples at every call
        assert any("resampled" in note for note in other.notes)
    with torch.no_grad():
        assert other.model.eval()(torch.zeros(1, 3, larger, larger)).isfinite().all()
