"""Products that finish themselves in the fused model: what is launched on a made-up Hopper, and the logits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels._cases import needs_kernel
from vtk.fused import FusedViT, fuse
from vtk.fused.kernel_count import Counting
from vtk.fused.stages import Plan
from vtk_kernels import choices
from vtk_kernels._residual_kernel import counters_needed
from vtk_kernels.linear_residual import linear_residual
from vtk_kernels.splitk_linear import default_splits

Build = Callable[..., nn.Module]
CARD = "NVIDIA H200 NVL"


pytestmark = pytest.mark.usefixtures("made_up_card")


def chosen(rows: int, channels: int, branches: int = 1, dtype: str = "bfloat16") -> None:
    """Let a table choose the form of five kernels a block, its ends in slices, at so many rows."""
    entry = {"device": CARD, "torch": "2.11", "triton": "3.6", "dtype": dtype, "rows": rows, "n": channels}
    hidden = 4 * channels * branches
    table = [{**entry, "op": "ln_folded", "k": hidden, "choice": "folded"}]
    table += [{**entry, "op": "linear_residual", "k": k, "choice": "finish"} for k in (channels * branches, hidden)]
    choices.use(table)


def started(fused: FusedViT, batch: int) -> dict[str, int]:
    """Return the kernels of a pass over fake CUDA tensors, by operation."""
    with FakeTensorMode(), torch.no_grad():
        for module in fused.modules():
            for name, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                fake = torch.empty(value.shape, dtype=value.dtype, device="cuda")
                setattr(module, name, nn.Parameter(fake, requires_grad=False) if name in module._parameters else fake)
        images = torch.empty(batch, 3, *fused.image_size, dtype=fused.dtype, device="cuda")
        with Counting() as counting:
            fused.compute(images)
    return dict(counting.counts)


@pytest.mark.parametrize(
    ("name", "blocks", "branches"),
    [pytest.param("vit_small_patch16_18x2_224", 18, 2, marks=pytest.mark.slow), ("vit_base_patch16_224", 12, 1)],
)
def test_a_chain_is_five_kernels_a_block_and_none_for_its_counters(name: str, blocks: int, branches: int) -> None:
    """95 and 65 kernels; beyond the reach of what was measured the norms have kernels of their own again."""
    chosen(197, 192, branches)
    model = timm.create_model(name, embed_dim=192, num_heads=3)
    found = started(fuse(model, torch.bfloat16, keep_source=False), 1)
    assert sum(found.values()) <= 5 * blocks + 5
    assert found["patchify_counters"] == 1 and "patchify" not in found
    assert found["linear_residual"] == 2 * blocks - 1 and found["linear"] == blocks - 1
    many = started(fuse(model, torch.bfloat16, keep_source=False), 12)
    assert many["patchify"] == 1 and "linear_residual" not in many and many["add_norm"] == 2 * blocks + 1


def test_a_choice_of_the_product_before_a_norm_costs_no_kernel() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=3)
    entry = {"device": CARD, "torch": "2.11", "triton": "3.6", "dtype": "float16", "rows": 197, "n": 192}
    counts = {}
    for choice in ("aten", "triton", "finish"):
        choices.use([{**entry, "op": "splitk_linear", "k": k, "choice": choice} for k in (192, 768)])
        fused = fuse(model, torch.float16, keep_source=False, ln_folded=False)
        counts[choice] = started(fused, 1)
    assert len({sum(found.values()) for found in counts.values()}) == 1
    # the last two products are of one row, of which no measurement speaks
    assert counts["finish"]["linear_residual"] == counts["finish"]["norm"] == counts["triton"]["splitk_linear"] == 4
    assert counts["finish"]["patchify_counters"] == 1 and "linear_residual" not in counts["aten"]


def test_a_stem_that_is_no_product_goes_without_counters() -> None:
    chosen(197, 192, dtype="float16")
    model = timm.create_model("vit_tiny_patch16_224", depth=2, dynamic_img_size=True, dynamic_img_pad=True)
    found = started(fuse(model, torch.float16, keep_source=False), 1)
    assert found["linear_residual"] == 3 and not {"patchify_counters", "zeros", "new_zeros", "zero_"} & set(found)


@needs_kernel
@pytest.mark.parametrize("folded", [True, False])
def test_logits_are_timms_and_the_same_bits_again(vit: Build, monkeypatch: pytest.MonkeyPatch, folded: bool) -> None:
    model = vit(dim=128, branches=2, depth=2, mlp_ratio=1, global_pool="avg", fc_norm=False)
    splits: list[int] = []

    def run(a: Tensor, w: Tensor, b: Tensor, x: Tensor, *cut: Any) -> tuple[Tensor, Tensor]:
        splits.append(cut[0])
        assert cut[0] == default_splits(a.shape[0] * a.shape[1], *w.shape) > 1
        return linear_residual(a, w, b, x, *cut, use_triton=True)

    for module in ("vtk.fused.stage_output", "vtk.fused.stage_input"):
        monkeypatch.setattr(f"{module}.linear_residual", run)
    monkeypatch.setattr(
        "vtk.fused.stage_output.choose",
        lambda op, *_: {"linear_residual": "finish", "splitk_linear": "finish" if not folded else "aten"}[op],
    )
    images = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    counters = torch.zeros(counters_needed(17, 128), dtype=torch.int32)
    fused = fuse(model.float())
    with torch.no_grad():
        compute = partial(fused.compute, images.float(), Plan(True, None, folded, counters))
        got, again = compute(), compute()
        torch.testing.assert_close(got.double(), model.double()(images), rtol=0, atol=2e-5)
    assert torch.equal(got, again) and not counters.any()
    assert len(splits) == 2 * (3 if folded else 4)
