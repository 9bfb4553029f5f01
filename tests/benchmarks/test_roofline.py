"""The floor's formulas against torch's counters and the parameters of small models."""

from functools import partial

import _ceilings
import pytest
import roofline
import timm
import torch
from _models import END_TO_END
from _runner import Ceilings
from roofline import Work, measured, work
from timm.models.vision_transformer import ParallelThingsBlock
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

BRANCHES = {0: {}, 2: {"num_parallel": 2}, 3: {"num_parallel": 3}}


def small(branches, **kwargs):
    block = {"block_fn": partial(ParallelThingsBlock, **BRANCHES[branches])} if branches else {}
    sizes = {"embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 7, "img_size": 64}
    return timm.create_model("vit_tiny_patch16_224", **(sizes | block | kwargs)).eval()


@pytest.mark.parametrize(("branches", "kwargs"), [(0, {}), (2, {"mlp_ratio": 3.0}), (3, {"reg_tokens": 4})])
def test_flops_are_what_torch_counts(branches, kwargs):
    model = small(branches, **kwargs)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(torch.randn(2, 3, 64, 64))
    assert work(model, 2).flops == counter.get_total_flops()


@pytest.mark.parametrize("name", ["vit_small_patch16_dinov3", "eva02_tiny_patch14_224"])
def test_flops_of_models_with_rotary_embedding_are_what_torch_counts(name):
    sizes = {"embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 7, "img_size": 56 if "14" in name else 64}
    model = timm.create_model(name, **sizes).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(torch.randn(2, 3, sizes["img_size"], sizes["img_size"]))
    assert work(model, 2).flops == counter.get_total_flops()


def test_weights_are_the_parameters():
    model = small(2)
    assert work(model, 5).weight_bytes == sum(p.numel() for p in model.parameters()) * 2
    assert work(model, 5, bytes_per_element=4).weight_bytes == sum(p.nbytes for p in model.parameters())


def test_tokens_are_every_tensor_between_five_kernels():
    model = small(2)
    n, c = 17, 48
    # per block, two branches: x → qkv → o → x → hidden → x, each result written and read once; the residual is read
    # and written by the two products that add to it, and read by the two that normalise it
    per_block = 2 * (2 * 3 * c + 2 * c + 2 * 4 * c) + 6 * c
    assert work(model, 1).token_bytes == 3 * per_block * n * 2
    assert work(model, 1).live_bytes == (c + 2 * 4 * c) * n * 2


def test_the_floor_is_the_largest_term():
    ceilings = Ceilings(bytes_per_s=1e9, flop_per_s=1e12)
    assert Work(flops=5_000_000, weight_bytes=1000, token_bytes=9000, live_bytes=10).floor_us(ceilings, 100) == 5
    assert Work(flops=500_000, weight_bytes=1000, token_bytes=9000, live_bytes=10).floor_us(ceilings, 100) == 1
    assert Work(flops=500_000, weight_bytes=1000, token_bytes=9000, live_bytes=101).floor_us(ceilings, 100) == 10


@pytest.mark.parametrize(("name", "floors"), [
    ("S18x2", {1: 43, 8: 274, 64: 2251, 256: 8874}), ("B18x2", {1: 171, 8: 1049, 64: 8393, 256: 33574}),
])  # fmt: skip
def test_the_papers_models_have_the_floors_of_the_plan(name, floors):
    # worked out apart from this code, at 800 TFLOP/s and 3.0 TB/s
    model = roofline.on_meta(END_TO_END[name], 224)
    assert {b: round(work(model, b).floor_us(roofline.ASSUMED)) for b in floors} == floors


def test_measured_ceilings_are_preferred_and_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["roofline.py", "--ceilings", str(tmp_path)])
    monkeypatch.setattr(roofline, "SUBJECTS", (("B/16", 224), ("B/16", 384)))
    roofline.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ceilings assumed: 800 TFLOP/s") and len(lines) == 1 + 2 * len(roofline.BATCHES)
    device = _ceilings.Device(Ceilings(2e12, 600e12), 1.2, 6.0, 40 << 20)
    lines = ["what,value,unit", *(f"{r['what']},{r['value']},{r['unit']}" for r in device.rows())]
    (tmp_path / "gpu_ceilings.csv").write_text("\n".join(lines) + "\n")
    assert measured(tmp_path) == (Ceilings(2e12, 600e12), 40 << 20)
    roofline.main()
    assert "ceilings measured: 600 TFLOP/s, 2.00 TB/s, L2 40 MiB" in capsys.readouterr().out


def test_ceilings_are_measured_on_a_cpu_too():
    found = _ceilings.measure(torch.device("cpu"), quick=True)
    assert found.ceilings.bytes_per_s > 1e6 and found.ceilings.flop_per_s > 1e6 and found.cache_bytes is None
