"""Accuracy without each unit against models edited by hand; interrupted and shared runs; the model as it was."""

import copy

import pytest
import torch

from tests.vtk.analysis._models import images, timm_model, tiny_vit
from vtk.analysis import Share, lesion_study
from vtk.analysis.diagnostics import diagnostic
from vtk.analysis.diagnostics.base import Run
from vtk.errors import DataError, UsageError


def accuracy(model, batches):
    with torch.no_grad():
        return sum(int((model(x).argmax(1) == y).sum()) for x, y in batches) / sum(len(y) for _, y in batches)


def taught(model, count=24, sizes=(10, 10, 4), side=8):
    """Images whose labels are what the model says of them, but for every sixth."""
    batches = images(count, side=side, sizes=sizes)
    with torch.no_grad():
        labels = torch.cat([model(x).argmax(1) for x, _ in batches])
    labels[::6] = (labels[::6] + 1) % 3
    return [(x, y) for (x, _), y in zip(batches, labels.split(sizes), strict=True)]


def test_a_vits_values_are_those_of_copies_whose_layer_scale_is_zero():
    model = tiny_vit(depth=3, init_values=0.9)
    batches = taught(model)
    found = lesion_study(model, batches)
    assert found.accuracy == pytest.approx(20 / 24) and (found.images, found.classes) == (24, 3)
    stem, *units = found.units
    assert stem.accuracy is None and stem.delta is None
    for number, unit in enumerate(units):
        edited = copy.deepcopy(model)
        block = edited.blocks[number // 2]
        with torch.no_grad():
            (block.ls2 if number % 2 else block.ls1).gamma.zero_()
        expected = accuracy(edited, batches)
        assert unit.accuracy == pytest.approx(expected) and unit.delta == pytest.approx(expected - 20 / 24)
        with torch.no_grad():
            other = [edited(x).argmax(1) != model(x).argmax(1) for x, _ in batches]
        assert unit.changed == pytest.approx(torch.cat(other).double().mean().item())
    assert len({unit.accuracy for unit in units}) > 2, "units differ"


def test_the_standard_error_is_that_of_paired_differences():
    model = tiny_vit(depth=1)
    batches = taught(model)
    edited = copy.deepcopy(model)
    with torch.no_grad():
        edited.blocks[0].mlp.fc2.weight.zero_()
        edited.blocks[0].mlp.fc2.bias.zero_()
        pairs = [(edited(x).argmax(1) == y).double() - (model(x).argmax(1) == y).double() for x, y in batches]
    differences = torch.cat(pairs)
    (mlp,) = (unit for unit in lesion_study(model, batches).units if unit.kind == "mlp")
    assert mlp.error == pytest.approx(float(differences.std(correction=0)) / 24**0.5)


def test_a_resnets_values_are_those_of_copies_whose_last_norm_is_zero():
    model = timm_model("resnet18", num_classes=3, layers=(1, 1, 1, 1), zero_init_last=False).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    batches = taught(model, 8, (8,), side=32)
    for unit in lesion_study(model, batches).units[1:]:
        edited = copy.deepcopy(model)
        norm = edited.get_submodule(unit.name).bn2
        with torch.no_grad():
            norm.weight.zero_()
            norm.bias.zero_()
        assert unit.accuracy == pytest.approx(accuracy(edited, batches))


def test_a_single_convolutions_values_are_those_of_copies_whose_kernel_is_one_in_its_centre():
    small = {"layers": (1, 2, 1, 1), "channels": (8, 8, 16, 16), "zero_init_last": False}
    model = timm_model("resnet26", num_classes=3, **small).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    batches = taught(model, 24, (24,), side=32)
    found = lesion_study(model, batches, convolutions=True)
    blocks = ("1.0", "2.0", "2.1", "3.0", "4.0")
    assert [u.name for u in found.units[1:]] == [f"layer{block}.conv2" for block in blocks]
    for unit in found.units[1:]:
        edited = copy.deepcopy(model)
        conv = edited.get_submodule(unit.name)
        torch.nn.init.dirac_(conv.weight)
        with torch.no_grad():
            other = [edited(x).argmax(1) != model(x).argmax(1) for x, _ in batches]
        assert unit.accuracy == pytest.approx(accuracy(edited, batches))
        assert unit.changed == pytest.approx(torch.cat(other).double().mean().item())
    assert any(unit.changed for unit in found.units[1:]) and found.convolutions
    text = " ".join(diagnostic("lesion").read({**found.to_dict(), "accuracy": 0.9}))
    assert "Without a convolution it changes by" in text and "Conv block" not in text


def test_a_convolution_that_is_a_layer_of_its_own_keeps_its_name(monkeypatch):
    from vtk.analysis.probes import convolutions
    from vtk.analysis.probes.residual_units import Unit

    down = torch.nn.Conv2d(4, 4, 3, stride=2, padding=1)
    units = [Unit("stages.1.downsample", "subsampling", (), (down,), "output", down)]
    monkeypatch.setattr(convolutions, "residual_units", lambda model: units)
    (found,) = convolutions.single_convolutions(down)
    assert found.name == "stages.1.downsample" and found.outlets == (down,)


def test_a_model_without_convolution_blocks_is_told_as_without_the_option():
    model = tiny_vit(depth=2)
    batches = taught(model)
    found = lesion_study(model, batches, convolutions=True)
    assert found == lesion_study(model, batches) and not found.convolutions
    (picture,) = diagnostic("lesion").draw([Run("vit", found.to_dict())])
    assert "single convolution" not in picture.caption


def test_the_model_is_as_it_was():
    model = tiny_vit(depth=2, drop_path_rate=0.3).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    lesion_study(model, images(4))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_interrupted_run_goes_on_where_it_was():
    model = tiny_vit(depth=2)
    batches = taught(model)
    kept, calls = [], []
    whole = lesion_study(model, batches, save=lambda rows: kept.append([list(row) for row in rows]))
    assert [len(rows) for rows in kept] == [1, 2, 3]
    model.register_forward_hook(lambda *_: calls.append(1))
    assert lesion_study(model, batches, kept=kept[1]) == whole
    assert len(calls) == 5, "the third batch only: once whole and once without each of four units"


@pytest.mark.parametrize("world", [2, 4])
def test_several_processes_find_the_same(world):
    model = tiny_vit(depth=2)
    batches = taught(model)
    whole = lesion_study(model, batches)
    sums, parts = [], []  # what each call of `total` adds up to is found rank by rank, one call more in every round

    class Unknown(Exception):
        pass

    def process(rank):
        at = 0

        def total(tensor):
            nonlocal at
            if at < len(sums):
                at += 1
                return sums[at - 1].clone()
            parts.append(tensor.clone())
            raise Unknown

        return lesion_study(model, batches, share=Share(rank, world, total))

    while True:
        parts.clear()
        found = []
        for rank in range(world):
            try:
                found.append(process(rank))
            except Unknown:
                pass
        if found:
            assert len(found) == world and all(one == whole for one in found)
            return
        sums.append(sum(parts))


def test_what_it_cannot_measure_is_refused():
    model = tiny_vit()
    with pytest.raises(UsageError, match="one class number"):
        lesion_study(model, [(x, torch.zeros(len(x), 3)) for x, _ in images(2)])
    with pytest.raises(UsageError, match="labels reach 7"):
        lesion_study(model, [(x, y * 0 + 7) for x, y in images(2)])
    with pytest.raises(DataError):
        lesion_study(model, [])


def unit(name, kind, delta, error=0.01):
    return {"name": name, "kind": kind, "accuracy": 0.8 + delta, "delta": delta, "error": error, "changed": 0.1}


FOUND = {
    "accuracy": 0.8, "classes": 10, "images": 400,
    "units": [
        {"name": "stem", "kind": "other", "accuracy": None, "delta": None, "error": None, "changed": None},
        unit("b.0.attn", "msa", -0.3), unit("b.0.mlp", "mlp", -0.1), unit("b.1.attn", "msa", -0.005),
        unit("b.1.mlp", "mlp", 0.05),
    ],
}  # fmt: skip


def test_the_reading_names_what_is_needed_and_what_is_not():
    text = " ".join(diagnostic("lesion").read(FOUND))
    assert "The most important units are: b.0.attn (−30.0 points), b.0.mlp (−10.0 points)." in text
    assert "Without an MSA it changes by −15.2 points on average." in text
    assert "1 of 4 units can be removed" in text and "b.1.attn" in text
    assert "accuracy is higher without b.1.mlp (+5.0 points)" in text
    assert "nothing can be lost" in diagnostic("lesion").read({**FOUND, "accuracy": 0.11})[0]
    assert diagnostic("lesion").numbers(FOUND)["change of accuracy without the unit it needs most"] == -0.3


def test_it_is_drawn_in_points():
    (picture,) = diagnostic("lesion").draw([Run("a", FOUND)])
    values = picture.figure.axes[0].get_lines()[0].get_ydata()
    assert values[1:] == pytest.approx([-30, -10, -0.5, 5]) and values[0] != values[0]
    assert "a 80.0 %" in picture.caption
