"""Λ of scaled Context Broadcasting against numpy."""

import json

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from tests.vtk.analysis._attention import context
from tests.vtk.analysis._models import images, timm_model
from vtk.analysis.diagnostics.base import Run
from vtk.analysis.diagnostics.cb_scales import DIAGNOSTIC
from vtk.analysis.measures.cb_scales import context_scales
from vtk.card import Transform
from vtk.errors import UsageError
from vtk.models.create import build_model
from vtk.models.transforms.context_broadcast import ContextBroadcast


def scaled(name="vit_tiny_patch16_224", depth=4, branches=0, seed=0, **options):
    model = build_model(
        name, num_classes=3, img_size=32, pretrained=False,
        kwargs={"depth": depth, "embed_dim": 24, "num_heads": 3},
        transforms=([Transform("parallelize", {"branches": branches})] if branches else [])
        + [Transform("add_context_broadcast", {"scale": True, **options})],
    ).model  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, ContextBroadcast):
            module.scale.data.normal_(0.1, 0.2, generator=generator)
    return model


def test_numbers_are_those_of_numpy():
    model = scaled()
    found = context_scales(model).layers
    assert [layer.name for layer in found] == [f"blocks.{i}.mlp.cb" for i in range(4)]
    assert [layer.block for layer in found] == [1, 2, 3, 4]
    for layer in found:
        values = model.get_submodule(layer.name).scale.detach().numpy().astype(np.float64)
        assert (layer.where, layer.placement, layer.channels) == ("mlp", "end", 24)
        assert layer.mean == pytest.approx(values.mean())
        assert layer.deviation == pytest.approx(values.std())
        assert layer.negative == (values < 0).sum() / 24 and 0 < layer.negative < 1
        assert layer.ratio == pytest.approx(np.quantile(np.abs(values), 0.1) / np.quantile(np.abs(values), 0.9))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"placement": "mid", "layers": "upper"},
         [("blocks.2.mlp.cb", 3, "mlp", "mid", 96), ("blocks.3.mlp.cb", 4, "mlp", "mid", 96)]),
        ({"placement": "front", "on": "both", "layers": [1]},
         [("blocks.1.attn.cb", 2, "msa", "front", 24), ("blocks.1.mlp.cb", 2, "mlp", "front", 24)]),
        ({"branches": 2, "on": "both", "layers": [0]},
         [("blocks.0.cb", 1, "mlp", "end", 24), ("blocks.0.cb_msa", 1, "msa", "end", 24)]),
    ],
    ids=["mid", "front of both", "parallel"],
)  # fmt: skip
def test_every_placement_is_found(options, expected):
    found = context_scales(scaled(**options)).layers
    told = {(one.name, one.block, one.where, one.placement, one.channels) for one in found}
    assert told == set(expected)


def test_models_without_scales_are_refused_in_one_line():
    with pytest.raises(UsageError, match=r"ResNet has no Context Broadcasting; .*--cb-scale` adds it to a ViT"):
        context_scales(timm_model("test_resnet"))
    plain = build_model(
        "test_vit", num_classes=3, pretrained=False, transforms=[Transform("add_context_broadcast", {})]
    )
    with pytest.raises(UsageError, match="plain Context Broadcasting, whose weight is ½ everywhere"):
        context_scales(plain.model)


def test_the_diagnostic_reads_the_trend_and_draws_two_models():
    model: VisionTransformer = scaled()
    for value, block in zip((-0.1, 0.0, 0.3, 0.5), model.blocks, strict=True):
        block.mlp.cb.scale.data.fill_(value)
    result = json.loads(json.dumps(DIAGNOSTIC.measure(context(model, images(1, side=32), side=32))))
    told = " ".join(DIAGNOSTIC.read(result))
    assert "λ is 0.175 on average over 4 layers, and negative in 25 % of the channels" in told
    assert "Upper layers use more of the mean than lower ones, as in the paper" in told
    assert [layer["ratio"] for layer in result["layers"]] == [1.0, None, 1.0, 1.0]
    assert DIAGNOSTIC.numbers(result) == {"mean of λ": pytest.approx(0.175), "negative λ, share": 0.25}
    for block in model.blocks:
        block.mlp.cb.scale.data.normal_(0, 1e-4)
    little = DIAGNOSTIC.read(DIAGNOSTIC.measure(context(model, images(1, side=32), side=32)))
    assert "near its initial 0" in little[0] and "do not differ by more" in little[-1]
    for block in model.blocks:
        block.mlp.cb.scale.data.zero_()
    start = DIAGNOSTIC.measure(context(model, images(1, side=32), side=32))
    assert DIAGNOSTIC.read(start) == [
        "Λ is 0 everywhere, its initial value: the model broadcasts nothing yet; fine-tune it."
    ]
    for runs in ([Run("one", result)], [Run("one", result), Run("two", start)]):
        assert [picture.name for picture in DIAGNOSTIC.draw(runs)] == ["cb-scales", "cb-scales-ratio"]
