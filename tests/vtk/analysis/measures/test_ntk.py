"""The neural tangent kernel against the explicit Jacobian of small models, in fp64."""

import math

import pytest
import torch
from timm.models.mlp_mixer import MlpMixer
from torch import nn

from tests.vtk.analysis._models import images, timm_model, tiny_vit
from vtk.analysis import ntk_condition, tangent_kernel
from vtk.errors import DataError, UsageError


def jacobian(model, x, outputs):
    """Rows image by image, by one backward for each."""
    rows = []
    for i in range(len(x)):
        logits = model(x[i : i + 1])[0]
        for value in [logits.sum()] if outputs == "sum" else logits:
            parts = torch.autograd.grad(value, list(model.parameters()), retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


MODELS = {
    "vit": lambda: tiny_vit(),
    "parallel vit": lambda: timm_model(
        "vit_small_patch16_18x2_224", img_size=16, patch_size=8, depth=1, embed_dim=16, num_heads=2, num_classes=3
    ),
    "swin": lambda: timm_model(
        "swin_tiny_patch4_window7_224",
        img_size=32, window_size=4, embed_dim=8, depths=(2,), num_heads=(2,), num_classes=3,
    ),
    "mixer": lambda: MlpMixer(img_size=32, patch_size=8, num_blocks=1, embed_dim=16, num_classes=3),
    "resnet": lambda: timm_model("resnet18", layers=(1, 1, 1, 1), channels=(4, 4, 8, 8), num_classes=3),
}  # fmt: skip


@pytest.mark.parametrize("outputs", ["sum", "all"])
@pytest.mark.parametrize("name", MODELS)
def test_the_kernel_is_the_jacobian_times_its_transpose(name, outputs):
    model = MODELS[name]().double()
    x = images(3, side=8 if name == "vit" else 16 if "parallel" in name else 32)[0][0]
    explicit = jacobian(model, x, outputs)
    found = tangent_kernel(model, x, outputs=outputs)
    assert found.shape == (len(explicit), len(explicit)) and found.dtype == torch.float64
    torch.testing.assert_close(found, explicit @ explicit.T, rtol=1e-9, atol=1e-9 * float(found.max()))


def test_the_condition_is_the_mean_over_diagonal_blocks():
    model, batches = tiny_vit(), images(11, sizes=(4, 4, 3))
    rows = jacobian(model, torch.cat([x for x, _ in batches]), "sum")
    expected = []
    for first in (0, 4):
        singular = torch.linalg.svdvals(rows[first : first + 4])
        expected.append(float(singular[0] / singular[-1]) ** 2)
    found = ntk_condition(model, batches, block=4, max_images=10)  # two images fill no block
    assert found.conditions == pytest.approx(expected, rel=1e-6)
    assert found.condition == pytest.approx(sum(expected) / 2, rel=1e-6)
    assert (found.block_images, found.images) == (4, 8) and [len(v) for v in found.eigenvalues] == [4, 4]
    assert ntk_condition(model, batches, block=48).block_images == 11


def test_a_linear_model_has_the_kernel_of_its_images():
    """logits = W·x + b: the sum's gradient is x for each row of W and 1 for each bias, so Θ = classes·(X·Xᵀ + 1)."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).double()
    x = images(5)[0][0]
    flat = x.flatten(1)
    torch.testing.assert_close(tangent_kernel(model, x), 3 * (flat @ flat.T + 1), rtol=1e-12, atol=1e-9)
    everything = tangent_kernel(model, x, outputs="all")
    torch.testing.assert_close(everything, torch.kron(flat @ flat.T + 1, torch.eye(3).double()), rtol=1e-12, atol=1e-9)


def test_single_precision_gives_the_condition_of_double():
    model, batches = tiny_vit(embed_dim=16), images(12)
    double = ntk_condition(model, batches).condition
    single = ntk_condition(model.float(), batches).condition
    assert single == pytest.approx(double, rel=1e-3) and double > 10


def test_equal_images_make_it_singular():
    x = images(3)[0][0].float()
    x = torch.cat([x, x[:1]])
    found = ntk_condition(tiny_vit().float(), [(x, torch.zeros(4, dtype=torch.int64))])
    assert math.isinf(found.condition) and found.conditions == (math.inf,)


def test_relu_takes_the_place_of_gelu_and_goes_again():
    model, batches = tiny_vit(), images(4)
    before = [type(m).__name__ for m in model.modules()]
    rectified = ntk_condition(model, batches, rectified=True)
    assert [type(m).__name__ for m in model.modules()] == before and rectified.rectified
    plain = ntk_condition(model, batches)
    model.blocks[0].mlp.act = nn.ReLU()
    assert ntk_condition(model, batches).eigenvalues == rectified.eigenvalues != plain.eigenvalues


def test_the_model_is_as_it_was():
    model = tiny_vit().train()
    model.patch_embed.proj.weight.requires_grad_(False)
    state = {n: v.clone() for n, v in model.state_dict().items()}
    frozen = ntk_condition(model, images(4))
    assert all(torch.equal(state[n], v) for n, v in model.state_dict().items())
    assert model.training and model.blocks[0].mlp.training and all(p.grad is None for p in model.parameters())
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["patch_embed.proj.weight"]
    assert frozen == ntk_condition(tiny_vit(), images(4))


@pytest.mark.parametrize(
    "arguments, error, match",
    [
        ({"block": 1}, UsageError, "`block` is 1"),
        ({"outputs": "mean"}, UsageError, "'mean' are not known; give sum or all"),
        ({"max_images": 1}, DataError, "two images or more"),
    ],
)
def test_mistakes_are_named(arguments, error, match):
    with pytest.raises(error, match=match):
        ntk_condition(tiny_vit(), images(4), **arguments)


def test_a_model_that_looks_at_its_batch_is_refused():
    class Peeks(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(192, 3)

        def forward(self, x):
            return self.head(x.flatten(1)) if float(x.mean()) > -100 else self.head(0 * x.flatten(1))

    with pytest.raises(UsageError, match="cannot be differentiated image by image"):
        ntk_condition(Peeks().double(), images(3))
