"""The drift of joined blocks, against sums written out and against cases with a known answer."""

import copy

import pytest
import timm
import torch

from vtk.models.transforms.parallel_blocks import parallelize
from vtk.runtime.drift import measure_drift


def pair(branches: int, **kwargs: object) -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=5, img_size=32, **kwargs)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    model.eval()
    joined = copy.deepcopy(model)
    parallelize(joined, branches=branches)
    return model, joined


@pytest.mark.parametrize("branches", [2, 3])
def test_ratios_and_cosines_are_what_their_names_say(branches: int) -> None:
    model, joined = pair(branches)
    images = torch.randn(21, 3, 32, 32)  # more than a batch, and no multiple of it
    drift = measure_drift(model, joined, branches, images)
    with torch.no_grad():
        x = model._pos_embed(model.patch_embed(images))
        assert [row.blocks for row in drift.blocks] == [(i, i + branches - 1) for i in range(0, 6, branches)]
        for row, block in zip(drift.blocks, joined.blocks, strict=True):
            y = x
            for i in range(row.blocks[0], row.blocks[1] + 1):
                y = model.blocks[i](y)
            off = float((block(x) - y).norm())
            assert row.output == pytest.approx(off / float(y.norm()), rel=1e-4)
            assert row.update == pytest.approx(off / float((y - x).norm()), rel=1e-4)
            assert row.output > 0
            x = y
        a, b = model(images).double(), joined(images).double()
    cosine = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))
    assert drift.count == 21
    assert drift.cosine_mean == pytest.approx(float(cosine.mean()), rel=1e-6)
    assert drift.cosine_min == pytest.approx(float(cosine.min()), rel=1e-6)
    assert drift.agreement == float((a.argmax(1) == b.argmax(1)).double().mean())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_blocks_that_hardly_act_can_be_joined() -> None:
    model, _ = pair(2, init_values=1e-5)
    for block in model.blocks:
        block.ls1.gamma.data.fill_(1e-5)
        block.ls2.gamma.data.fill_(1e-5)
    joined = copy.deepcopy(model)
    parallelize(joined, branches=2)
    drift = measure_drift(model, joined, 2, torch.randn(3, 3, 32, 32))
    assert drift.agreement == 1 and drift.cosine_min > 1 - 1e-6
    assert all(row.output < 1e-6 for row in drift.blocks)
