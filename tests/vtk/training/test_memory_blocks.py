"""The memory modes as a change of a model: what stays, what is undone, what they do not touch and say so."""

import copy
import pickle
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block, ParallelThingsBlock
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vtk.models.transforms.context_layers import add_context_broadcast
from vtk.training.engine.precision import Bf16
from vtk.training.finetune_config import MODES
from vtk.training.frozen_ffn import apply_memory_mode, remove_memory_mode
from vtk.training.frozen_ffn.flash import attention, attention_backward, kernel_of
from vtk.training.policies import policy
from vtk_kernels import choices
from vtk_kernels._nearest import candidate, nearest


def attn_only(model, name="attn"):
    policy.apply(model, policy.select(model, name))
    policy.train_mode(model)
    return model


def other(name, **kwargs):
    return timm.create_model(name, depths=(1, 1, 1, 1), **kwargs)


def gradients(model, images):
    model.zero_grad()
    torch.manual_seed(0)
    F.cross_entropy(model(images).float(), torch.arange(len(images)) % 3).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def bitwise(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("mode", MODES)
def test_names_and_evaluation_stay_and_removing_restores(tiny, mode):
    model = attn_only(tiny(block_fn=partial(ParallelThingsBlock, num_parallel=2)))
    images = torch.randn(2, 3, 32, 32)
    modules = [(n, type(m)) for n, m in model.named_modules()]
    state = {n: t.clone() for n, t in model.state_dict().items()}
    before = gradients(model, images)
    with torch.no_grad():
        logits = model.eval()(images)
    assert apply_memory_mode(model, mode).changed == 2
    assert [n for n, _ in model.named_modules()] == [n for n, _ in modules]
    assert all(isinstance(b, ParallelThingsBlock) for b in model.blocks)
    assert bitwise(model.state_dict(), state)
    with torch.no_grad():
        assert torch.equal(model(images), logits)
    model.train()
    other = gradients(model, images)
    assert all(torch.allclose(other[n], before[n], rtol=0.05, atol=1e-3) for n in before)
    remove_memory_mode(model)
    assert [(n, type(m)) for n, m in model.named_modules()] == modules
    assert bitwise(gradients(model, images), before)


@pytest.mark.parametrize("regime", ["fp32", "bf16"])
def test_exact_modes_agree_to_the_last_bit(tiny, regime):
    """So it makes no difference which of them a run takes, or is resumed with."""
    found = []
    for mode in ("plain", "recompute", "minimal"):
        model = attn_only(tiny(qk_norm=True, drop_path_rate=0.3))
        apply_memory_mode(model, mode)
        if regime == "bf16":
            Bf16().prepare(model, [n for n, p in model.named_parameters() if p.requires_grad])
        found.append(gradients(model, torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))))
        assert {g.dtype for g in found[-1].values()} == {torch.float32}
    assert bitwise(found[0], found[1]) and bitwise(found[0], found[2])


def test_a_copy_trains_alike(tiny):
    model = attn_only(tiny())
    add_context_broadcast(model, scale=True)
    apply_memory_mode(model, "minimal")
    images = torch.randn(2, 3, 32, 32)
    expected = gradients(model, images)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert bitwise(gradients(twin, images), expected)
        remove_memory_mode(twin)
        assert type(twin.blocks[0]) is Block


@pytest.mark.parametrize("mode", MODES)
def test_compiled_blocks_give_the_same_gradients(tiny, mode):
    model = attn_only(tiny(qk_norm=True, init_values=0.1)).double()
    apply_memory_mode(model, mode)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected = gradients(model, images)
    torch._dynamo.reset()
    model.blocks[0].compile(fullgraph=True, backend="aot_eager_decomp_partition")  # both are alike
    found = gradients(model, images)
    scale = max(float(g.norm()) for g in expected.values())
    assert all(float((found[n] - expected[n]).norm()) <= 1e-12 * scale for n in expected)


def test_what_is_trained_after_all_gets_its_gradient(tiny):
    model = attn_only(tiny())
    images = torch.randn(2, 3, 32, 32)
    for name in ("norm1.weight", "mlp.fc1.weight"):
        twin = copy.deepcopy(model)
        twin.get_parameter(f"blocks.1.{name}").requires_grad_(True)
        expected = gradients(twin, images)
        apply_memory_mode(model, "recompute")
        model.get_parameter(f"blocks.1.{name}").requires_grad_(True)
        assert f"blocks.1.{name}" in gradients(model, images).keys() == expected.keys()
        policy.apply(model, policy.select(model, "attn"))


def test_masks_take_the_blocks_own_way(tiny):
    model = attn_only(tiny())
    block, x = model.blocks[0], torch.randn(2, 5, 32)
    expected = block(x, is_causal=True)
    apply_memory_mode(model, "minimal")
    assert torch.equal(block(x, is_causal=True), expected)
    with torch.no_grad():
        assert torch.equal(block(x), Block.forward(block, x))


@pytest.mark.parametrize(
    ("build", "train", "mode", "words"),
    [
        (lambda tiny: other("swin_tiny_patch4_window7_224", embed_dim=24), "attn", "act8", "SwinTransformer has"),
        (lambda tiny: other("convnext_atto"), "head", "minimal", "ConvNeXt has no block"),
        (lambda tiny: tiny(), "attn+norm", "act8", "norms are trained"),
        (lambda tiny: tiny(), "full", "recompute", "norms are trained"),
        (lambda tiny: tiny(), "ffn", "recompute", "FFNs are trained"),
        (lambda tiny: tiny(), "head", "minimal", "no weight at or before the blocks is trained"),
        (lambda tiny: tiny(act_layer="relu"), "attn", "act8", "ReLU, not GELU or SiLU"),
        (lambda tiny: tiny(proj_drop_rate=0.1), "attn", "recompute", "FFNs have dropout"),
    ],
)  # fmt: skip
def test_what_it_does_not_know_keeps_torchs_autograd_and_one_line_says_why(tiny, build, train, mode, words):
    model = attn_only(build(tiny), train)
    plan = apply_memory_mode(model, mode)
    assert plan.changed == 0 and not plan.effective
    assert plan.note.startswith(f"--memory {mode} changes nothing: ") and words in plan.note and "\n" not in plan.note


def test_what_it_can_do_only_in_part(tiny):
    for kwargs, words in (
        ({"act_layer": "relu"}, "not GELU or SiLU"),
        ({"attn_drop_rate": 0.1}, "attention has dropout"),
    ):
        plan = apply_memory_mode(attn_only(tiny(**kwargs)), "minimal")
        assert plan.changed == 2 and "is done in part" in plan.note and words in plan.note
    model = attn_only(tiny())
    model.blocks[0].mlp.fc1.register_forward_hook(lambda *_: None)
    model.blocks[1].attn.register_forward_hook(lambda *_: None)
    plan = apply_memory_mode(model, "recompute")
    assert plan.changed == 0 and "FFNs have hooks" in plan.note and "attention has hooks" in plan.note


def test_attention_by_plain_products():
    """What CUDA computes where it has no flash kernel: the same as the CPU's, in pieces."""
    generator = torch.Generator().manual_seed(0)
    g, q, k, v = (torch.randn(3, 2, 7, 4, dtype=torch.float64, generator=generator) for _ in range(4))
    results = []
    for kernel in ("cpu", "math"):
        o, lse = attention(q, k, v, kernel)
        results.append([o, lse, *attention_backward(g.transpose(1, 2), q, k, v, o, lse, kernel)])
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(*results, strict=True))
    tracked = [t.clone().requires_grad_(True) for t in (q, k, v)]
    F.scaled_dot_product_attention(*tracked).backward(g)
    assert all(torch.equal(t.grad, found) for t, found in zip(tracked, results[0][2:], strict=True))


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_the_calls_of_cudas_kernels(kernel):
    """Without a GPU only that torch takes the arguments and gives these shapes, the same of both."""
    g, q, k, v = (torch.empty(3, 2, 7, 8, device="meta", dtype=torch.bfloat16) for _ in range(4))
    shapes = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if "attention" in function.name():
                shapes["backward" in function.name()] = args[5].shape if "backward" in function.name() else out[1].shape
            return out

    with Watch():
        o, lse = attention(q, k, v, kernel)
        attention_backward(g.transpose(1, 2), q, k, v, o, lse, kernel)
    assert shapes[True] == shapes[False]  # logsumexp goes in as it came out, whatever its dimensions
    assert (o.shape, o.dtype) == ((3, 7, 2, 8), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((3, 2, 7), torch.float32)
    grads = attention_backward(g.transpose(1, 2), q, k, v, o, lse, kernel)
    assert [(x.shape, x.dtype) for x in grads] == [(q.shape, q.dtype)] * 3


def test_what_was_measured_to_be_quicker_attends(monkeypatch):
    asked = []
    entry = {"device": "NVIDIA H200", "torch": "2.14", "triton": "3.8", "op": "kept_attention", "dtype": "bfloat16"}
    near = candidate("kept_attention", 577, 12, {**entry, "rows": 32, "n": 577, "k": 12}, "", 0, ())
    assert near is not None and nearest([near], 16) is near and nearest([near], 1) is None  # by images × heads

    def choose(*question):
        asked.append(question)
        return "cudnn" if question[1] == 32 else choices.DEFAULT["kept_attention"]

    monkeypatch.setattr(choices, "choose", choose)
    monkeypatch.setattr(choices, "device_name", lambda x: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for taken in (True, False):
        monkeypatch.setattr("vtk.training.frozen_ffn.flash._takes_cudnn", lambda q, taken=taken: taken)
        with FakeTensorMode(allow_non_fake_inputs=True):
            found = [
                kernel_of(torch.empty(b, 12, 577, d, device="cuda", dtype=dtype))
                for b, d, dtype in (
                    (32, 64, torch.bfloat16), (8, 64, torch.float16), (32, 80, torch.bfloat16), (32, 64, torch.float32)
                )
            ]  # fmt: skip
        assert found == ["cudnn" if taken else "flash", "flash", "flash", "math"]
    assert asked[:2] == [
        ("kept_attention", 32, 577, 12, torch.bfloat16, "NVIDIA H200"),
        ("kept_attention", 8, 577, 12, torch.float16, "NVIDIA H200"),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
@pytest.mark.parametrize("tokens", [50, 197, 577])
def test_both_kernels_on_a_gpu(kernel, tokens):
    """No farther from fp64 than torch's SDPA is, times two, on the strided q, k and v of one packed matrix."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, tokens, 3, 3, 64, generator=generator)
    g = torch.randn(2, tokens, 3, 64, generator=generator)

    def run(dtype, device, call):
        q, k, v = qkv.to(device, dtype).permute(2, 0, 3, 1, 4).unbind(0)
        return [t.double().cpu() for t in call(q, k, v, g.to(device, dtype))]

    def ours(q, k, v, g):
        o, lse = attention(q, k, v, kernel)
        return [o.transpose(1, 2), *attention_backward(g, q, k, v, o, lse, kernel)]

    def theirs(q, k, v, g):
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v)
        return [o.detach(), *torch.autograd.grad(o, (q, k, v), g.transpose(1, 2))]

    exact = run(torch.float64, "cpu", theirs)
    sides = [run(torch.bfloat16, "cuda", call) for call in (ours, theirs)]
    for a, b, wanted in zip(*sides, exact, strict=True):
        mine, torchs = (float((t - wanted).norm() / wanted.norm()) for t in (a, b))
        assert mine <= 2 * torchs + 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(tiny, mode, dtype):
    """Gradients of the Triton and flash paths against torch's own in fp64."""
    model = attn_only(tiny(embed_dim=128, qk_norm=True, init_values=0.1))
    images = torch.randn(4, 3, 32, 32)
    exact = gradients(copy.deepcopy(model).double(), images.double())
    model.cuda()
    apply_memory_mode(model, mode)
    if dtype == torch.bfloat16:
        Bf16().prepare(model, [n for n, p in model.named_parameters() if p.requires_grad])
    policy.train_mode(model)
    torch.manual_seed(0)
    F.cross_entropy(model(images.cuda()).float(), torch.arange(4, device="cuda") % 3).backward()
    found = torch.cat([p.grad.flatten().double().cpu() for p in model.parameters() if p.grad is not None])
    expected = torch.cat([g.flatten() for g in exact.values()])
    limit = 0.998 if dtype == torch.bfloat16 else 0.9999 if mode == "act8" else 0.999999
    assert float(F.cosine_similarity(found, expected, dim=0)) >= limit
