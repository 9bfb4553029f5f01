"""The bf16 and fp16 regimes against hand-written loops, and their promises about masters and frozen tensors."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from vtk.errors import UnavailableError, UsageError
from vtk.training.engine.loss_scale import DynamicScaler
from vtk.training.engine.precision import Bf16, Fp16, Fp32, make_precision
from vtk.training.finetune import finetune
from vtk.training.frozen_ffn.blocks import apply_memory_mode
from vtk.training.policies import policy

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
halves = pytest.mark.parametrize("regime", DTYPES)


def frozen_vit(tiny, name="attn", **kwargs):
    model = tiny(**kwargs)
    policy.apply(model, policy.select(model, name))
    policy.train_mode(model)
    return model


def prepared(model, regime="bf16"):
    precision = Bf16() if regime == "bf16" else Fp16(DynamicScaler("cpu"))
    precision.prepare(model, [n for n, p in model.named_parameters() if p.requires_grad])
    return precision


def batch(n=6):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, 32, 32, generator=generator), torch.arange(n) % 3


def reference_gradients(model, images, labels, dtype):
    """The regime by hand: every weight rounded to 16 bits and cast inside autograd, by torch's functional_call."""
    masters = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in model.named_parameters()}
    casts = {n: m.to(dtype) for n, m in masters.items()}
    logits = torch.func.functional_call(model, casts, (images.to(dtype),))
    F.cross_entropy(logits.float(), labels).backward()
    return {n: m.grad for n, m in masters.items() if m.grad is not None}


@halves
def test_gradients_equal_the_hand_written_regime(tiny, regime):
    model = frozen_vit(tiny)
    expected = reference_gradients(copy.deepcopy(model), *batch(), DTYPES[regime])
    prepared(model, regime)
    images, labels = batch()
    F.cross_entropy(model(images).float(), labels).backward()
    got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert got.keys() == expected.keys() and len(got) == 11
    for name, grad in got.items():
        assert grad.dtype == torch.float32
        assert torch.equal(grad, expected[name]), name


@halves
def test_storage(tiny, regime):
    model, dtype = frozen_vit(tiny), DTYPES[regime]
    prepared(model, regime)
    model(batch()[0])
    for name, p in model.named_parameters():
        assert p.dtype == (torch.float32 if p.requires_grad else dtype), name
    assert model.blocks[0].attn.qkv.weight.dtype == dtype  # what the forward pass sees
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_gradients_accumulate_in_fp32(tiny):
    model = frozen_vit(tiny)
    prepared(model)
    pair = [(x, y) for x, y in zip(*(t.split(3) for t in batch()), strict=True)]
    master = dict(model.named_parameters())["blocks.0.attn.qkv.weight"]
    separate = []
    for images, labels in pair:
        model.zero_grad()
        F.cross_entropy(model(images).float(), labels).backward()
        separate.append(master.grad.clone())
    model.zero_grad()
    for images, labels in pair:
        F.cross_entropy(model(images).float(), labels).backward()
    assert torch.equal(master.grad, separate[0] + separate[1])


@pytest.mark.parametrize("regime", ["fp32", "bf16"])
def test_checkpointed_gradients_equal_plain_ones(tiny, regime):
    grads = []
    for checkpointing in (False, True):
        model = frozen_vit(tiny)
        assert not model.patch_embed.proj.weight.requires_grad
        if regime == "bf16":
            prepared(model)
        model.set_grad_checkpointing(checkpointing)
        images, labels = batch()
        F.cross_entropy(model(images).float(), labels).backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert "blocks.0.attn.qkv.weight" in grads[1]
    assert grads[0].keys() == grads[1].keys()
    for name in grads[0]:
        assert torch.equal(grads[0][name], grads[1][name]), name


@halves
def test_evaluation_equals_the_whole_model_in_16_bits(tiny, regime):
    model = frozen_vit(tiny)
    plain = copy.deepcopy(model).eval().to(DTYPES[regime])
    precision = prepared(model, regime)
    model(batch()[0]).sum().backward()
    precision.before_eval(model)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(batch()[0]), plain(batch()[0].to(DTYPES[regime])))


@halves
def test_masters_and_frozen_tensors_come_back_bit_equal(tiny, regime):
    model = frozen_vit(tiny)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    precision = prepared(model, regime)
    model(batch()[0])
    after = precision.master_state_dict(model)
    assert after.keys() == before.keys()
    assert all(t.dtype == before[n].dtype and torch.equal(t, before[n]) for n, t in after.items())


def test_a_changed_frozen_tensor_shows(tiny):
    model = frozen_vit(tiny)
    precision = prepared(model)
    with torch.no_grad():
        model.norm.weight[0] = 3.0
    assert float(precision.master_state_dict(model)["norm.weight"][0]) == 3.0


def test_trained_batch_norm_keeps_fp32_statistics_and_is_evaluated_in_bf16(tiny):
    model = tiny()
    model.patch_embed.norm = nn.BatchNorm1d(4)
    policy.apply(model, policy.select(model, "full"))
    model.train()
    precision = prepared(model)
    norm = model.patch_embed.norm
    model(batch()[0]).sum().backward()
    assert norm.running_mean.dtype == torch.float32 and int(norm.num_batches_tracked) == 1
    assert norm.weight.grad.dtype == torch.float32
    digits = norm.running_var - norm.running_var.to(torch.bfloat16).float()
    assert float(digits.abs().max()) > 0  # more digits than bf16 has
    masters = precision.master_state_dict(model)
    precision.before_eval(model)
    model.eval()
    fresh = tiny()
    fresh.patch_embed.norm = nn.BatchNorm1d(4)
    fresh.load_state_dict(masters)
    fresh.eval().to(torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(model(batch()[0]), fresh(batch()[0].to(torch.bfloat16)))
    model.train()
    model(batch()[0])
    assert norm.running_mean.dtype == torch.float32 and int(norm.num_batches_tracked) == 2


@halves
def test_parts_called_alone_after_an_evaluation_compute_with_the_masters(regime):
    """As the backbone of a pre-training run, whose features are drawn at its end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), nn.Flatten())
    model[0][1].running_mean.normal_()
    plain, images = copy.deepcopy(model).eval(), torch.randn(2, 3, 8, 8)
    precision = prepared(model, regime)
    with torch.no_grad():
        assert model.eval()(images).dtype == DTYPES[regime]
        precision.before_eval(model)
        assert torch.equal(model[0](images), plain[0](images))


def test_a_parameter_used_twice_is_cast_once(tiny):
    model = tiny()
    model.blocks[1].attn.qkv.weight = model.blocks[0].attn.qkv.weight
    policy.apply(model, policy.select(model, "attn"))
    prepared(model)
    model(batch()[0])
    assert model.blocks[0].attn.qkv.weight is model.blocks[1].attn.qkv.weight


def test_make_precision():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert isinstance(make_precision("auto", cpu), Fp32) and isinstance(make_precision("auto", cuda), Bf16)
    assert isinstance(make_precision("bf16", cpu), Bf16) and isinstance(make_precision("fp32", cuda), Fp32)
    with pytest.raises(UnavailableError, match=r"fp16 trains on CUDA only, this is the cpu; use fp32 or bf16"):
        make_precision("fp16", cpu)
    assert make_precision("fp16", cpu, train=False).name == "fp16"  # to count memory
    with pytest.raises(UsageError, match="fp8 is not known; choose auto, fp32, bf16 or fp16"):
        make_precision("fp8", cpu)


def test_used_once(tiny):
    model = frozen_vit(tiny)
    precision = prepared(model)
    with pytest.raises(ValueError, match="before"):
        precision.prepare(model, [])


@pytest.mark.parametrize("mode", ["plain", "act8", "recompute", "minimal"])
def test_memory_modes_run_in_fp16(tiny, mode):
    """Against fp64 the engine's error is at most twice that of plain torch in fp16."""

    def gradients(model, images):
        model(images).double().square().sum().backward()
        return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}

    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected = gradients(frozen_vit(tiny, qk_norm=True).double(), images.double())
    found = []
    for change in (False, True):
        model = frozen_vit(tiny, qk_norm=True)
        if change:
            assert apply_memory_mode(model, mode).note is None
        prepared(model, "fp16")
        found.append(gradients(model, images))
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    plain, ours = (torch.stack([(f[n] - expected[n]).norm() for n in expected]).norm() / norm for f in found)
    assert float(ours) <= 2 * float(plain) + 4e-3 * (mode == "act8")


def test_an_fp16_run_from_images_to_eval(config, photos, tmp_path, capsys, monkeypatch):
    """Whole runs on the CPU, where a user is refused: all they write and measure needs no GPU to be checked."""
    from vtk.commands import eval as eval_command

    with pytest.raises(UnavailableError, match="trains on CUDA only"):
        finetune(config(precision="fp16"))
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr("vtk.training.runs.plan.make_precision", lambda *a, **k: Fp16(DynamicScaler("cpu", 2.0**20)))
    changes = {"precision": "fp16", "epochs": 4, "memory": "recompute"}
    whole = finetune(config(out=tmp_path / "whole", **changes))
    finetune(config(out=tmp_path / "parts", stop_after=2, **changes))
    parts = finetune(config(out=tmp_path / "parts", resume=True, **changes))
    for name in ("task/task.safetensors", "task/task.json", "task-last/task.safetensors"):
        assert (whole.out / name).read_bytes() == (parts.out / name).read_bytes(), name
    skipped = [row["skipped_steps"] for row in parts.rows]
    assert skipped[0] > 0 and skipped[-1] == 0  # 2²⁰ is too much at first
    assert skipped == [row["skipped_steps"] for row in whole.rows]
    assert (parts.out / "metrics.csv").read_text().splitlines()[0].count("skipped_steps") == 1
    assert {t.dtype for t in load_file(parts.task / "task.safetensors").values()} == {torch.float32}
    capsys.readouterr()
    assert eval_command.main([str(parts.task), str(photos), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["top1"], told["loss"]) == (parts.metrics.top1, parts.metrics.loss)
    assert told["precision"] == "fp16" and told["same_conditions"] and parts.metrics.top1 >= 0.6


@pytest.mark.gpu
@pytest.mark.parametrize("train", ["attn", "lora"])
def test_fp16_on_a_gpu_comes_near_bf16(config, tmp_path, train):
    found = {}
    for name in ("bf16", "fp16"):
        changes = {"device": "cuda", "precision": name, "train": train, "epochs": 3, "out": tmp_path / name}
        found[name] = finetune(config(**changes))
    assert found["fp16"].rows[-1]["loss"] == pytest.approx(found["bf16"].rows[-1]["loss"], abs=0.05)
    assert found["fp16"].rows[-1]["skipped_steps"] == 0
