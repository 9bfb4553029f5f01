"""The graph of the form ``factors`` in torch: stacks of low-rank changes give each task's own model."""

import copy
import math
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelThingsBlock
from torch import nn

from vtk.errors import UsageError
from vtk.models.transforms.context_layers import add_context_broadcast
from vtk_export.tasks.factor_layout import COUNTS, Layout, head_layers, plan
from vtk_export.tasks.factor_rows import Changes, balanced, open_sizes, padded_bytes, task_rows
from vtk_export.tasks.factor_vit import FactorViT
from vtk_export.tasks.gathered_vit import join_biases

EVA = {"depth": 1, "embed_dim": 32, "num_heads": 2, "img_size": 32}
VIT = ("vit_tiny_patch16_224", EVA)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": VIT,
    "qk-norm": (VIT[0], {**EVA, "qk_norm": True}),
    "registers": (VIT[0], {**EVA, "reg_tokens": 2, "class_token": True}),
    "no-embed-class": (VIT[0], {**EVA, "no_embed_class": True, "init_values": 0.1}),
    "mean": (VIT[0], {**EVA, "global_pool": "avg", "class_token": False}),
    "attention-pool": (VIT[0], {**EVA, "global_pool": "map", "class_token": False}),
    "no-qkv-bias": (VIT[0], {**EVA, "qkv_bias": False, "norm_layer": "rmsnorm", "qk_norm": True}),
    "parallel-context": (VIT[0], {**EVA, "block_fn": ParallelThingsBlock, "init_values": 0.1}),
    "distilled": ("deit_tiny_distilled_patch16_224", EVA),
    "dinov3": ("vit_small_patch16_dinov3", EVA),
    "eva02": ("eva02_tiny_patch14_224", {**EVA, "img_size": 28}),
    "eva-split-qkv": ("eva02_base_patch14_224", {**EVA, "img_size": 28}),
}
QUICK = ("plain", "dinov3")
RANKS = (3, 0, 5)


class Case:
    """A base, and tasks that changed it: whole models, and what a pack would hold."""

    def __init__(self, name: str, options: dict[str, Any], *, context: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        self.models: list[nn.Module] = []
        self.changes: list[Changes] = []

        def noise(*shape: int) -> torch.Tensor:
            return 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64)

        for rank, classes in zip(RANKS, (2, 4, 3), strict=True):
            model = timm.create_model(name, num_classes=classes, **options).double().eval()
            if context:
                add_context_broadcast(model, on="both")
            join_biases(model)
            if not self.models:
                self.start = copy.deepcopy(model)
            heads = tuple(f"{head}." for head in head_layers(model))
            base = {k: v for k, v in self.start.state_dict().items() if not k.startswith(heads)}
            model.load_state_dict(base, strict=False)
            changes = Changes({}, {})
            for key, value in model.named_parameters():
                where = key.rpartition(".")[0]
                linear = value.ndim == 2 and isinstance(model.get_submodule(where), nn.Linear)
                if where in head_layers(model):
                    changes.tensors[key] = value.data
                elif ("attn" not in key and "token" not in key and key != "pos_embed") or "gamma" in key:
                    continue
                elif linear or key == "pos_embed":
                    flat = value.data.view(-1, value.shape[-1])
                    a, b = noise(rank, flat.shape[1]), noise(len(flat), rank)
                    flat += b @ a
                    changes.factors[key] = (a, b)
                else:
                    value.data += noise(*value.shape)
                    changes.tensors[key] = value.data
            self.models.append(model)
            self.changes.append(changes)

    def layout(self) -> Layout:
        factored = {key for found in self.changes for key in found.factors}
        return plan(self.start, factored, {key for found in self.changes for key in found.tensors}, "fp32", {})


def stacks_of(layout: Layout, rows: list[dict[str, torch.Tensor]], classes: list[int]) -> list[torch.Tensor]:
    """Pad and stack as the layout says; a test's own lines."""
    sizes, found = open_sizes(layout, rows), []
    for stack in layout.stacks:
        if stack.name == COUNTS:
            found.append(torch.tensor(classes, dtype=torch.int32))
            continue
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in stack.axes]
        whole = torch.full((len(rows), *shape), stack.fill, dtype=torch.float64)
        for i, row in enumerate(rows):
            whole[(i, *(slice(n) for n in row[stack.name].shape))] = row[stack.name]
        found.append(whole)
    return found


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_a_mixed_batch_equals_the_merged_models_in_fp64(kind: str) -> None:
    case = Case(*KINDS[kind], context="context" in kind)
    layout = case.layout()
    start = case.start.state_dict()
    rows = [task_rows(layout, start, changes, "it") for changes in case.changes]
    stacks = stacks_of(layout, rows, [2, 4, 3])
    task = [2, 0, 1, 1, 2, 7, -1]
    images = torch.randn(len(task), 3, *2 * [KINDS[kind][1]["img_size"]], dtype=torch.float64)
    with torch.no_grad():
        logits, counts = FactorViT(case.start, layout)(images, torch.tensor(task, dtype=torch.int32), stacks)
        for row, image, t, n in zip(logits, images, task, counts.tolist(), strict=True):
            if t not in range(3):
                assert n == 0
                assert row.isnan().all()
                continue
            expected = case.models[t](image[None])[0]
            assert n == len(expected)
            torch.testing.assert_close(row[:n], expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
            # a distilled model has the mean of two heads
            assert (row[n:] <= torch.finfo(torch.float32).min / 2).all()


def test_padding_is_counted() -> None:
    case = Case(*VIT)
    layout = case.layout()
    rows = [task_rows(layout, case.start.state_dict(), changes, "it") for changes in case.changes]
    stacks = stacks_of(layout, rows, [2, 4, 3])
    whole = sum(4 * stack.numel() for stack in stacks[:-1])
    used = sum(4 * row.numel() for found in rows for row in found.values())
    assert padded_bytes(layout, [{k: v.float() for k, v in found.items()} for found in rows]) == whole - used > 0


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9], ids=str)
def test_balanced_factors_are_of_one_magnitude_and_of_the_same_product(scale: float) -> None:
    a, b = torch.randn(4, 16) * scale, torch.randn(8, 4) / scale
    a[1] = 0
    even_a, even_b = balanced(a, b)
    torch.testing.assert_close(even_b.double() @ even_a.double(), b.double() @ a.double(), rtol=1e-12, atol=0)
    keep = [0, 2, 3]
    large, small = even_a.abs().amax(1)[keep], even_b.abs().amax(0)[keep]
    assert (large / small).log2().abs().max() <= 1
    assert even_a.half().isfinite().all()
    assert even_b.half().isfinite().all()


def test_a_change_that_can_be_no_stack_is_named() -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=2, **EVA)
    with pytest.raises(UsageError, match=r"`patch_embed.proj.weight` .* a Conv2d; use --form files instead"):
        plan(model, set(), {"patch_embed.proj.weight"}, "fp16", {})


def test_a_task_that_changed_what_has_no_stack_is_refused_by_name() -> None:
    case = Case(*VIT)
    layout = plan(case.start, {"blocks.0.attn.qkv.weight"}, set(), "fp16", {})
    with pytest.raises(UsageError, match=r"it changed `pos_embed`, of which this file has no stack"):
        task_rows(layout, case.start.state_dict(), case.changes[0], "it")


def test_a_hundred_tasks_of_rank_16_of_vit_s_take_less_than_two_more_models() -> None:
    """The bound is 2.2 files of one task in fp32; tables are of rank 16, too."""
    with torch.device("meta"):
        model = timm.create_model("vit_small_patch16_224", num_classes=10)
    names = dict(model.named_parameters())
    factored = {key for key, value in names.items() if (".attn." in key and value.ndim == 2) or key == "pos_embed"}
    layout = plan(model, factored, {"cls_token"}, "fp16", {})
    sizes = {axis: 10 if axis == "classes" else 16 for stack in layout.stacks for axis in stack.axes}
    width = {"fp16": 2, "fp32": 4, "int32": 4}
    task = sum(
        width[stack.dtype] * math.prod(axis if isinstance(axis, int) else sizes[axis] for axis in stack.axes)
        for stack in layout.stacks
    )
    whole = sum(4 * value.numel() for value in names.values())
    assert whole + 100 * task <= 2.2 * whole
