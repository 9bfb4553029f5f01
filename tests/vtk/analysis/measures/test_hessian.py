"""Curvature against the full Hessian of a small ViT, and against scipy on products written another way."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from tests.vtk.analysis._models import images, timm_model, tiny_vit
from vtk.analysis import CrossEntropy, hessian_max, hessian_spectrum, parameter_blocks
from vtk.analysis.probes.second_order import hessian_product
from vtk.errors import DataError, UsageError


def full_hessian(model, batch, names=None):
    """The matrix of second derivatives, by torch.func over one flat vector; of ``names`` only."""
    named = {n: p.detach() for n, p in model.named_parameters()}
    chosen = list(named) if names is None else list(names)
    sizes = [named[n].numel() for n in chosen]

    def loss(flat):
        parts = {n: part.view_as(named[n]) for n, part in zip(chosen, flat.split(sizes), strict=True)}
        return F.cross_entropy(functional_call(model, {**named, **parts}, (batch[0],)), batch[1])

    flat = torch.cat([named[n].flatten() for n in chosen])
    return torch.func.jacrev(torch.func.grad(loss), chunk_size=256)(flat)


@pytest.fixture(scope="module")
def subject():
    model = tiny_vit()
    model.blocks[0].attn.fused_attn = False  # for the oracle only; the tests below look at a fused copy
    batch = images(12)[0]
    hessian = full_hessian(model, batch)
    model.blocks[0].attn.fused_attn = True
    return model, batch, hessian


@pytest.fixture(scope="module")
def saddle():
    """A confidently wrong model: the three eigenvalues of largest magnitude are negative."""
    model = tiny_vit(1)
    model.blocks[0].attn.fused_attn = False
    x = images(12)[0][0]
    batch = x, model(x).argmin(dim=1)
    hessian = full_hessian(model, batch)
    model.blocks[0].attn.fused_attn = True
    return model, batch, hessian


def by_magnitude(matrix, top):
    values = torch.linalg.eigvalsh(matrix)
    return values[values.abs().argsort(descending=True)][:top].tolist()


def algebraic(matrix, top):
    return torch.linalg.eigvalsh(matrix).flip(0)[:top].tolist()


def test_a_product_is_the_full_hessian_times_the_vector_also_over_several_batches(subject):
    model, _, hessian = subject
    assert len(hessian) <= 2000
    vector = torch.randn(len(hessian), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for sizes in ((12,), (5, 4, 3)):
        with hessian_product(model, CrossEntropy(), images(12, sizes=sizes)) as product:
            for scale in (1.0, 2.0):  # the second call uses what the first kept
                torch.testing.assert_close(product(scale * vector), scale * hessian @ vector, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", ["lanczos", "power"])
def test_the_largest_eigenvalues_are_those_of_the_full_hessian(subject, method):
    model, batch, hessian = subject
    found = hessian_max(model, [batch], top=2, method=method, max_iter=300, tol=1e-5)
    assert found.converged == {"whole": True} and found.images == 12
    assert found.values["whole"] == pytest.approx(algebraic(hessian, 2), rel=1e-2)
    assert found.value == found.values["whole"][0] == found.lambda_max["whole"]


@pytest.mark.parametrize("method", ["lanczos", "power"])
def test_a_larger_negative_eigenvalue_is_not_lambda_max(saddle, method):
    model, batch, hessian = saddle
    values = torch.linalg.eigvalsh(hessian)
    assert -values[2] > values[-1] > 0  # so that all of the top 3 are negative
    groups = parameter_blocks(model)
    groups = {name: groups[name] for name in (("whole", "msa", "mlp") if method == "lanczos" else ("whole",))}
    found = hessian_max(model, [batch], groups=groups, method=method, max_iter=500, tol=1e-4)
    assert found.value == pytest.approx(float(values[-1]), rel=1e-2)
    assert found.magnitude == pytest.approx(float(values[0]), rel=1e-2)
    for group, rows in rows_of(model, groups).items():
        block = hessian[rows][:, rows]
        assert found.lambda_max[group] == pytest.approx(algebraic(block, 1)[0], rel=2e-2), group
        assert found.lambda_largest_magnitude[group] == pytest.approx(by_magnitude(block, 1)[0], rel=2e-2), group
    whole = found.to_dict()
    assert whole["lambda_max"]["whole"] == found.value and whole["lambda_largest_magnitude"]["whole"] == found.magnitude


def test_a_spectrum_of_negative_values_has_its_lambda_max_beside_it(saddle):
    model, batch, hessian = saddle
    found, values = hessian_spectrum(model, [batch], top=3), torch.linalg.eigvalsh(hessian)
    assert found.values[0] == pytest.approx(values[:3].tolist(), rel=1e-2) and found.negative_share == 1.0
    assert found.lambda_max == pytest.approx((float(values[-1]),), rel=1e-2)


def rows_of(model, groups):
    """The rows of the full Hessian of each group of parameters."""
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    where = dict(zip(sizes, torch.arange(sum(sizes.values())).split(list(sizes.values())), strict=True))
    return {group: torch.cat([where[n] for n in parameters]) for group, parameters in groups.items()}


def test_the_default_is_within_a_percent_of_the_oracle_with_few_products(subject):
    model, batch, hessian = subject
    found = hessian_max(model, [batch])
    assert found.value == pytest.approx(algebraic(hessian, 1)[0], rel=1e-2) and found.products <= 40


def test_negative_eigenvalues_keep_their_sign_and_count_in_nep_and_ape(subject):
    model, batch, hessian = subject
    expected = by_magnitude(hessian, 12)
    assert min(expected) < 0 < max(expected)
    found = hessian_spectrum(model, [batch], top=12, tol=1e-6, max_iter=200)
    assert found.values[0] == pytest.approx(expected, rel=1e-2)
    assert found.negative_share == sum(v < 0 for v in expected) / 12
    assert found.positive_mean == pytest.approx(np.mean([v for v in expected if v > 0]), rel=1e-2)
    assert found.converged == 1.0


def test_the_spectrum_is_of_each_batch_alone():
    model, batches = tiny_vit(), images(12, sizes=(5, 7))
    found = hessian_spectrum(model, batches, top=1)
    expected = [(hessian_max(model, [batch]).magnitude,) for batch in batches]
    assert np.array(found.values) == pytest.approx(np.array(expected), rel=1e-2)
    assert found.images == 12 and expected[0] != pytest.approx(expected[1], rel=0.02)


def test_weight_decay_shifts_every_eigenvalue_by_itself(subject):
    model, batch, _ = subject
    plain = hessian_max(model, [batch], top=2, tol=1e-8).values["whole"]
    decayed = hessian_max(model, [batch], top=2, tol=1e-8, loss=CrossEntropy(weight_decay=0.25)).values["whole"]
    assert decayed == pytest.approx([v + 0.25 for v in plain], rel=1e-5)


def test_diagonal_blocks_are_those_of_the_full_hessian(subject):
    model, batch, hessian = subject
    groups = parameter_blocks(model)
    assert list(groups) == ["whole", "embedding", "msa", "mlp", "block 1"]
    found = hessian_max(model, [batch], groups=groups, tol=1e-4)
    for group, rows in rows_of(model, groups).items():
        expected = algebraic(hessian[rows][:, rows], 1)[0]
        assert found.values[group][0] == pytest.approx(expected, rel=1e-2), group
    assert sum(p.numel() for g in ("msa", "mlp") for p in groups[g].values()) == sum(
        p.numel() for p in groups["block 1"].values()
    )


def test_a_larger_model_agrees_with_scipy_on_products_by_finite_differences_of_gradients():
    """The oracle never differentiates twice: (∇L(w + hv) − ∇L(w − hv)) / 2h in fp64."""
    model = tiny_vit(1, embed_dim=24, depth=2, img_size=16, num_heads=3)
    batches = images(8, side=16, sizes=(5, 3))
    parameters = list(model.parameters())
    whole = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    base = torch.nn.utils.parameters_to_vector(parameters).detach()

    def gradient(flat):
        torch.nn.utils.vector_to_parameters(flat, parameters)
        parts = torch.autograd.grad(F.cross_entropy(model(whole[0]), whole[1]), parameters)
        return torch.cat([p.flatten() for p in parts])

    def product(v):
        v = torch.as_tensor(v).reshape(-1)
        step = 1e-4 / float(v.norm())
        return ((gradient(base + step * v) - gradient(base - step * v)) / (2 * step)).numpy()

    n = len(base)
    expected = eigsh(LinearOperator((n, n), matvec=product, dtype=np.float64), k=2, which="LA", tol=1e-4)[0]
    torch.nn.utils.vector_to_parameters(base, parameters)
    expected = sorted(expected, reverse=True)
    found = hessian_max(model, batches, top=2, tol=1e-4)
    assert found.values["whole"] == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("name, options", [
    ("vit_small_patch16_18x2_224", {"img_size": 32, "depth": 1, "embed_dim": 16, "num_heads": 2}),
    ("swin_tiny_patch4_window7_224",
     {"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (2,), "num_heads": (2,)}),
    ("test_resnet", {}),
])  # fmt: skip
def test_products_of_other_models_are_the_slopes_of_their_gradients(name, options):
    """Parallel branches and windows with masks have fused attention, ResNets BatchNorm with running statistics."""
    model = timm_model(name, num_classes=3, **options).double()
    batch = images(2, side=32)[0]
    parameters = list(model.parameters())
    with torch.no_grad():  # timm starts residual branches at 0, where ReLU has its corner
        for p in parameters:
            p.add_(0.05 * torch.randn_like(p))
    base = torch.nn.utils.parameters_to_vector(parameters).detach().clone()
    vector = torch.randn(len(base), dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def gradient(flat):
        torch.nn.utils.vector_to_parameters(flat, parameters)
        parts = torch.autograd.grad(F.cross_entropy(model(batch[0]), batch[1]), parameters)
        return torch.cat([p.flatten() for p in parts])

    step = 1e-5 / float(vector.norm())
    expected = (gradient(base + step * vector) - gradient(base - step * vector)) / (2 * step)
    torch.nn.utils.vector_to_parameters(base, parameters)
    with hessian_product(model, CrossEntropy(), [batch]) as product:
        error = (product(vector) - expected).norm() / expected.norm()
    assert float(error) < 1e-4


def test_the_model_is_as_it_was_and_frozen_weights_count():
    model = tiny_vit().train()
    model.patch_embed.proj.weight.requires_grad_(False)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    frozen = hessian_max(model, images(6)).value
    assert model.training and model.blocks[0].attn.training and model.blocks[0].attn.fused_attn
    assert [p.requires_grad for p in model.parameters()] == flags and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert frozen == hessian_max(tiny_vit(), images(6)).value


@pytest.fixture(scope="module")
def costs():
    """A gradient, a product over several batches, and a product over one whose graph is kept."""
    model = tiny_vit(embed_dim=96, depth=1, img_size=32, num_heads=3, mlp_ratio=4).float()
    held = [(x.float(), y) for x, y in images(8, side=32, sizes=(4, 4))]
    parameters = list(model.parameters())
    vector = torch.randn(sum(p.numel() for p in parameters))

    def gradient():
        for x, y in held:
            torch.autograd.grad(F.cross_entropy(model(x), y), parameters)

    whole = [(torch.cat([x for x, _ in held]), torch.cat([y for _, y in held]))]
    with hessian_product(model, CrossEntropy(), held) as many, hessian_product(model, CrossEntropy(), whole) as one:
        one(vector)
        yield gradient, lambda: many(vector), lambda: one(vector)


def test_a_product_costs_at_most_three_and_a_half_gradients(costs):
    counts = []
    for function in costs:
        with FlopCounterMode(display=False) as counter:
            function()
        counts.append(counter.get_total_flops())
    assert counts[1] <= 3.5 * counts[0] and counts[2] <= 2.5 * counts[0], counts


def test_a_loss_that_is_linear_in_what_is_chosen_has_no_curvature():
    class Mean:
        weight_decay = 0.0

        def __call__(self, model, x, labels):
            return model(x).mean()

    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).double()
    assert hessian_max(model, images(4), loss=Mean()).value == 0.0


@pytest.mark.parametrize(
    "arguments, error, match",
    [
        ({"top": 0}, UsageError, "0 eigenvalues of an operator on"),
        ({"method": "qr"}, UsageError, "unknown method 'qr'; give lanczos or power"),
        ({"tol": 0.0}, UsageError, "tolerance > 0"),
        ({"max_images": 0}, UsageError, "`max_images` is 0"),
        ({"batches": []}, DataError, "no images to analyse"),
    ],
)
def test_mistakes_are_named(arguments, error, match):
    batches = arguments.pop("batches", None)
    with pytest.raises(error, match=match):
        hessian_max(tiny_vit(), images(4) if batches is None else batches, **arguments)


def test_without_positive_values_their_mean_is_not_a_number():
    from vtk.analysis import HessianSpectrum

    found = HessianSpectrum(((-1.0, -0.5),), 1.0, 4)
    assert found.negative_share == 1.0 and math.isnan(found.to_dict()["positive_mean"])
