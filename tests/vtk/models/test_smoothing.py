"""The box blur at the end of stages (Park and Kim 2022, appendix B) against its formula, in models and refusals."""

import pytest
import timm
import torch

from vtk.analysis.probes.residual_units import residual_units
from vtk.errors import UsageError
from vtk.models.transforms.smoothing import SpatialSmoothing, add_smoothing
from vtk.training.train_config import TrainConfig

SMALL = {"num_classes": 3, "layers": (1, 2, 1, 1), "channels": (8, 8, 16, 16)}


def blurred(x):
    """The mean of each position and its right, lower and lower right neighbours; 0 outside of the map."""
    out = torch.zeros_like(x)
    height, width = x.shape[2:]
    for i in range(height):
        for j in range(width):
            out[:, :, i, j] = x[:, :, i : i + 2, j : j + 2].sum((2, 3)) / 4
    return out


@pytest.mark.parametrize("bounded", [False, True])
def test_it_is_the_written_out_mean(bounded):
    x = 8 * torch.randn(2, 3, 4, 5, dtype=torch.float64)
    expected = blurred((10 * torch.tanh(x / 10)).clamp(min=0) if bounded else x)
    torch.testing.assert_close(SpatialSmoothing(bounded)(x), expected, atol=1e-12, rtol=0)


def test_it_lowers_high_frequencies_and_keeps_a_constant_inside():
    x = torch.ones(1, 1, 6, 6)
    stripes = x * torch.tensor([1.0, -1.0] * 3)
    smooth = SpatialSmoothing()
    assert torch.equal(smooth(x)[..., :5, :5], x[..., :5, :5]) and not smooth(stripes)[..., :5].any()


@pytest.mark.parametrize(("name", "stage"), [("resnet18", "layer{}"), ("preact_resnet_18_cifar", "stages.{}.blocks")])
@pytest.mark.parametrize("stages", [None, [2, 3]])
def test_the_chosen_stages_end_with_it_and_tensors_keep_their_names(name, stage, stages):
    base = 1 if name == "resnet18" else 0
    model = timm.create_model(name, **SMALL).double().eval()
    keys, x = model.state_dict().keys(), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    before = {}
    assert add_smoothing(model, stages=stages) == {key: key for key in keys} and model.state_dict().keys() == keys
    for i in range(4):
        sequence = model.get_submodule(stage.format(i + base))
        last = sequence[-1]
        assert isinstance(last, SpatialSmoothing) == (stages is None or i in stages) and not last.training
        if isinstance(last, SpatialSmoothing):
            sequence[-2].register_forward_hook(lambda *call, i=i: before.__setitem__(i, call[-1]))
            sequence.register_forward_hook(lambda *call, i=i: before.__setitem__(f"{i} end", call[-1]))
    with torch.no_grad():
        model(x)
    for i in (2, 3) if stages else range(4):
        torch.testing.assert_close(before[f"{i} end"], blurred(before[i]), atol=1e-12, rtol=0)
    names = [unit.name for unit in residual_units(model)]
    assert sum(name.endswith(".smoothing") for name in names) == (2 if stages else 4)


@pytest.mark.parametrize(
    ("name", "arguments", "match"),
    [
        ("resnet18", {"kind": "sharp"}, "`--spatial-smoothing` is sharp; allowed is blur, tanh-blur"),
        ("resnet18", {"stages": [4]}, r"`stages` is \[4\]; give different numbers from 0 to 3"),
        ("resnet18", {"stages": [1, 1]}, r"`stages` is \[1, 1\]"),
        ("resnet18", {"stages": []}, r"`stages` is \[\]"),
        ("vit_tiny_patch16_224", {}, "VisionTransformer cannot have smoothing at the end of its stages"),
    ],
)
def test_what_cannot_have_it_is_named(name, arguments, match):
    model = timm.create_model(name, **(SMALL if name == "resnet18" else {"depth": 1}))
    with pytest.raises(UsageError, match=match) as caught:
        add_smoothing(model, **arguments)
    assert "\n" not in str(caught.value)


def test_it_is_added_once_after_attention_blocks():
    model = timm.create_model("resnet18", **SMALL)
    add_smoothing(model)
    with pytest.raises(UsageError, match="already has smoothing"):
        add_smoothing(model)
    flags = TrainConfig(msa_blocks=(2,), spatial_smoothing="blur")
    assert [t.op for t in flags.transforms()] == ["build_up", "add_smoothing"]
