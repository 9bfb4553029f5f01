"""Several tasks through one FFN: logits, losses and gradients are those of each model by itself."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import ParallelThingsBlock

from vtk.errors import UsageError
from vtk.models.transforms.context_layers import add_context_broadcast
from vtk.training.frozen_ffn.blocks import apply_memory_mode
from vtk.training.policies import policy
from vtk.training.runs.joint_model import JointModel, count_shared, share_frozen

PARALLEL = {"block_fn": partial(ParallelThingsBlock, num_parallel=2)}
CASES = {
    "plain": {},
    "layer scale, register tokens, head norm": {"init_values": 0.3, "reg_tokens": 2, "qk_norm": True},
    "no bias, mean pooling": {"qkv_bias": False, "global_pool": "avg", "class_token": False},
    "parallel": {**PARALLEL, "init_values": 0.3},
}


def make(tiny, count=3, policy_name="attn", transform=None, **kwargs):
    """Models of one base and their own attention, positions and classifiers; and copies of them that share nothing."""
    models = {}
    for i in range(count):
        model = tiny(img_size=(32, 48, 32)[i], num_classes=3 + i, **kwargs).double()
        if transform:
            add_context_broadcast(model, **transform)
        if models:
            first = models["0"].state_dict()
            model.load_state_dict(
                {k: v for k, v in first.items() if model.state_dict()[k].shape == v.shape}, strict=False
            )
        policy.apply(model, policy.select(model, policy_name))
        models[str(i)] = model
    alone = {name: copy.deepcopy(model) for name, model in models.items()}
    torch.manual_seed(1)
    for name, model in models.items():
        for (_, p), (_, q) in zip(model.named_parameters(), alone[name].named_parameters(), strict=True):
            if p.requires_grad:
                p.data += 0.1 * torch.randn_like(p)
                q.data.copy_(p)
        if name != "0":
            share_frozen(name, model, models["0"])
    return models, alone


def compare(models, alone, tasks, counts, seed=None):
    joint = JointModel(models)
    policy.train_mode(joint)
    sizes = [alone[str(t)].patch_embed.img_size for t in tasks]
    images = [torch.randn(n, 3, *size, dtype=torch.float64) for n, size in zip(counts, sizes, strict=True)]
    labels = [torch.randint(0, 3, (n,)) for n in counts]
    logits = joint(*images, tasks=tasks)
    sum(F.cross_entropy(x, y) for x, y in zip(logits, labels, strict=True)).backward()
    for t, x, y, found in zip(tasks, images, labels, logits, strict=True):
        own = alone[str(t)]
        policy.train_mode(own)
        expected = own(x)
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)
        F.cross_entropy(expected, y).backward()
        for (name, p), (_, q) in zip(models[str(t)].named_parameters(), own.named_parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                assert torch.allclose(p.grad, q.grad, rtol=0, atol=1e-12), name
    return joint


@pytest.mark.parametrize("mode", ["plain", "recompute", "minimal"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_models_alone(tiny, case, mode):
    models, alone = make(tiny, **CASES[case])
    for model in models.values():
        assert apply_memory_mode(model, mode).effective
    compare(models, alone, (0, 1, 2), (2, 3, 1))


@pytest.mark.parametrize("mode", ["plain", "recompute"])
@pytest.mark.parametrize("placement", ["end", "mid", "front"])
@pytest.mark.parametrize("kind", [{}, PARALLEL], ids=["sequential", "parallel"])
def test_context_broadcasting_stays_inside_an_image(tiny, kind, placement, mode):
    on = "mlp" if placement == "mid" else "both"
    models, alone = make(tiny, transform={"placement": placement, "on": on}, **kind)
    for model in models.values():
        apply_memory_mode(model, mode)
    compare(models, alone, (0, 1, 2), (2, 1, 2))


def test_the_ffn_of_a_block_runs_once_for_all_tasks(tiny):
    models, alone = make(tiny)
    seen = []

    def watch(name, act, x):
        seen.append((name, tuple(x.shape)))
        return type(act).forward(act, x)

    for name, model in models.items():
        act = model.blocks[1].mlp.act
        act.forward = partial(watch, name, act)
        apply_memory_mode(model, "plain")
    compare(models, alone, (0, 1, 2), (2, 3, 1))
    tokens = [m.pos_embed.shape[1] for m in models.values()]
    assert seen == [("0", (1, 2 * tokens[0] + 3 * tokens[1] + tokens[2], 128))]


def test_a_task_that_is_not_drawn_gets_no_gradient(tiny):
    models, alone = make(tiny)
    for model in models.values():
        apply_memory_mode(model, "recompute")
    compare(models, alone, (0, 2), (2, 2))
    assert all(p.grad is None for p in models["1"].parameters())
    compare(*make(tiny), (1,), (2,))


def test_stochastic_depth_drops_whole_images(tiny):
    models, _ = make(tiny, count=2, drop_path_rate=0.5)
    joint = JointModel(models)
    for model in models.values():
        apply_memory_mode(model, "plain")
    policy.train_mode(joint)
    for model in models.values():  # of the second block only the FFN is left: x + dropped(FFN)
        for block in model.blocks:
            block.attn.proj.weight.data.zero_()
            block.attn.proj.bias.data.zero_()
    one = torch.randn(1, 3, 32, 32, dtype=torch.float64).expand(24, -1, -1, -1)
    torch.manual_seed(0)
    rows = joint(one, torch.zeros(1, 3, 48, 48, dtype=torch.float64), tasks=(0, 1))[0]
    kinds = {tuple(round(v, 9) for v in row) for row in rows.tolist()}
    assert len(kinds) == 2  # an image keeps the FFN of block 1, or not; block 0 has rate 0


def test_head_policy_trains_heads(tiny):
    models, alone = make(tiny, policy_name="head")
    compare(models, alone, (0, 1, 2), (2, 3, 1))


def test_what_is_frozen_is_in_memory_once(tiny):
    models, _ = make(tiny)
    joint = JointModel(models)
    frozen = {k: p for k, p in models["0"].named_parameters() if not p.requires_grad}
    for model in models.values():
        assert all(p is frozen[k] for k, p in model.named_parameters() if k in frozen)
    assert count_shared(joint.models) == sum(p.numel() for p in frozen.values())
    total = sum(p.numel() for p in joint.parameters())  # counts each object once
    own = sum(p.numel() for m in models.values() for p in m.parameters() if p.requires_grad)
    assert total == own + count_shared(joint.models)


def test_refusals(tiny):
    import timm

    first, other = tiny(), tiny()
    for model in (first, other):
        policy.apply(model, policy.select(model, "attn"))
    other.blocks[1].mlp.fc1.weight.data[0, 0] += 1
    with pytest.raises(UsageError, match=r"task `b`: frozen `blocks\.1\.mlp\.fc1\.weight` is not that of the first"):
        share_frozen("b", other, first)
    other = tiny()
    policy.apply(other, policy.select(other, "attn+norm"))
    with pytest.raises(UsageError, match=r"task `b` trains `blocks\.0\.norm1\.weight`, which tasks of one run share"):
        share_frozen("b", other, first)
    swin = timm.create_model("swin_tiny_patch4_window7_224", embed_dim=16, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1))
    with pytest.raises(UsageError, match="task `a`: SwinTransformer is not timm's VisionTransformer"):
        JointModel({"a": swin})
