"""Families in the other parts of the toolkit: exported, or passed by or refused with one clear line."""

import dataclasses

import numpy as np
import onnxruntime
import pytest
import timm
import torch

import vtk
from tests.vtk.families._table import FAMILIES, Family
from vtk.bank import TaskBank
from vtk.errors import UsageError
from vtk.models.inputs import check_size
from vtk.models.valid_sizes import size_fault
from vtk.runtime.opening import open_source
from vtk.training.frozen_ffn.blocks import apply_memory_mode
from vtk.training.policies import policy
from vtk_export.graph.attention_rank import four_axes
from vtk_export.graph.convert import choose_form
from vtk_export.onnx.config import OnnxConfig
from vtk_export.onnx.export import export_onnx

BATCHES = (1, 2, 3, 7, 16)
BY_NAME = {family.name: family for family in FAMILIES}
# families whose blocks are not timm's VisionTransformer's, or that do more around them
UNKNOWN = ["swin_tiny_patch4_window7_224", "samvit_base_patch16_224", "levit_128s", "cait_xxs24_224", "mobilevit_xxs"]


def real(family: Family) -> torch.nn.Module:
    torch.manual_seed(0)
    try:
        return timm.create_model(family.name, num_classes=3, img_size=family.size, **family.kwargs)
    except TypeError:  # families that take any size have no argument for it
        return timm.create_model(family.name, num_classes=3, **family.kwargs)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_fused_is_refused_in_a_line_and_exported_as_it_is(name, capsys):
    model = real(BY_NAME[name]).eval()
    with pytest.raises(UsageError, match=f"cannot fuse {type(model).__name__}: ") as caught:
        vtk.fuse(model)
    assert "\n" not in str(caught.value) and "eager" in str(caught.value)
    assert choose_form(model, None) is model


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "levit_128s", "cait_xxs24_224"])
def test_the_memory_engine_leaves_other_blocks_alone_and_says_so(name):
    family = BY_NAME[name]
    model = real(family)
    policy.apply(model, policy.select(model, "attn"))
    before = {n: type(m) for n, m in model.named_modules()}
    plan = apply_memory_mode(model, "minimal")
    assert not plan.effective and {n: type(m) for n, m in model.named_modules()} == before
    assert plan.note is not None and "changes nothing" in plan.note and "\n" not in plan.note


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("tiny_nest", 72, r"`--img-size` 72 72: `tiny_nest` does not support it \(First level .*\); use 64 or 96"),
        (
            "hiera_tiny_224",
            80,
            r"not support it \(its windows or stages do not fit\); use 64 or 96",
        ),
        ("tiny_gcvit", 80, r"`tiny_gcvit` does not support it \(its windows or stages do not fit\); use 64 or 96"),
        ("pvt_v2_b0", 30, r"height 30 is not a multiple of the patch of `pvt_v2_b0` \(4\); use 32"),
    ],
)
def test_sizes_that_windows_cannot_take_are_refused_with_those_they_can(name, size, message):
    family = BY_NAME[name]
    with pytest.raises(UsageError, match=message) as caught:
        check_size(name, size, family.kwargs)
    for side in map(int, str(caught.value).rpartition("use ")[2].split(" or ")):
        assert check_size(name, side, family.kwargs) == (side, side)
        model = real(dataclasses.replace(family, size=side)).eval()  # timm's own model agrees
        with torch.no_grad():
            assert model(torch.zeros(1, 3, side, side)).shape == (1, 3)


def test_a_size_is_refused_before_the_data_are_looked_for(train, tmp_path):
    with pytest.raises(UsageError, match="use 64 or 96"):
        train(BY_NAME["tiny_nest"], img_size=72, data=tmp_path / "absent")


def test_plain_transformers_and_their_own_sizes_are_not_run():
    for name in ("vit_tiny_patch16_224", "deit3_small_patch16_224", "resnet18"):
        assert size_fault(name, (64, 96), {}) is None


@pytest.mark.parametrize("shape", [(6, 5, 4), (2, 3, 4, 5, 8)])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_other_ranks_is_the_same_with_four_axes(shape, masked):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *shape)
    mask = torch.randn(*shape[:-1], shape[-2]) if masked else None
    attend = torch.nn.functional.scaled_dot_product_attention
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is attend:
                seen.append(args[0].ndim)
            return func(*args, **(kwargs or {}))

    with Watch(), four_axes():
        found = attend(q, k, v, attn_mask=mask)
    assert seen == [4]
    scores = q.double() @ k.double().transpose(-1, -2) / shape[-1] ** 0.5
    expected = (scores + (mask.double() if masked else 0)).softmax(-1) @ v.double()
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "levit_128s", "samvit_base_patch16_224"])
def test_a_bank_refuses_a_family_it_does_not_know_and_stays_as_it_was(name, train):
    run = train(BY_NAME[name])
    bank = TaskBank()
    with pytest.raises(UsageError) as caught:
        bank.add("task", run.plan.out / "task")
    assert "\n" not in str(caught.value) and type(run.model).__name__ in str(caught.value)
    assert not list(bank.tasks)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_onnx_files_of_any_batch_are_the_model(family, train):
    run = train(family)
    result = export_onnx(open_source(run.plan.out / "task"), OnnxConfig(out=run.plan.out / "onnx"), show=False)
    session = onnxruntime.InferenceSession(str(result.path), providers=["CPUExecutionProvider"])
    model = run.model.eval()
    for batch in BATCHES:
        images = torch.randn(batch, 3, family.size, family.size)
        with torch.no_grad():
            expected = model(images).numpy()
        (found,) = session.run(None, {"pixel_values": images.numpy()})
        np.testing.assert_allclose(found, expected, atol=1e-4 * max(1.0, np.abs(expected).max()), rtol=0)
