"""Models built for their shapes are those that timm builds, and tensors with values are left to torch."""

import pytest
import timm
import torch

from vtk.models.meta_model import shapes_only


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("vit_tiny_patch16_224", {"depth": 1, "embed_dim": 16, "num_heads": 2, "init_values": 0.1}),
        ("vit_tiny_patch16_224", {"depth": 1, "global_pool": "map", "class_token": False, "dynamic_img_size": True}),
        ("swin_tiny_patch4_window7_224", {"depths": (1, 1, 1, 1), "embed_dim": 24}),
        ("pit_ti_224", {}),
        ("mixer_s32_224", {"drop_path_rate": 0.1}),
        ("convnext_atto", {"depths": (1, 1, 1, 1)}),
        ("resnet18", {}),
    ],
)
def test_names_shapes_and_kinds_are_timms(name: str, kwargs: dict[str, object]) -> None:
    with shapes_only():
        model = timm.create_model(name, **kwargs)
    wanted = timm.create_model(name, **kwargs)
    assert all(t.is_meta for t in model.state_dict().values())
    for mine, theirs in (
        (model.named_parameters(), wanted.named_parameters()), (model.named_buffers(), wanted.named_buffers()),
    ):  # fmt: skip
        assert {k: (v.shape, v.dtype, v.requires_grad) for k, v in mine} == {
            k: (v.shape, v.dtype, v.requires_grad) for k, v in theirs
        }


def test_tensors_with_values_are_filled() -> None:
    with shapes_only():
        blank = torch.empty(3)
        assert blank.fill_(2.0) is blank and torch.nn.init.ones_(blank) is blank
        real = torch.nn.init.constant_(torch.zeros(3, device="cpu"), 2.0).add_(1)
    assert real.tolist() == [3.0, 3.0, 3.0]
    assert torch.empty(2).fill_(1.0).tolist() == [1.0, 1.0]
