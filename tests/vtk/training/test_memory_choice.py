"""The estimate counts what real tensors keep, and the choices that are made from it."""

import json

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelThingsBlock

from vtk.errors import UsageError
from vtk.models.meta_model import shapes_only
from vtk.models.transforms.context_layers import add_context_broadcast
from vtk.training import memory
from vtk.training.engine.precision import Bf16
from vtk.training.engine.processes import Ranks
from vtk.training.finetune_config import MODES, FinetuneConfig
from vtk.training.frozen_ffn import apply_memory_mode, remove_memory_mode
from vtk.training.frozen_ffn.estimate import Footprint, footprints, kept_bytes, tensors_of
from vtk.training.memory import MemoryChoice, Subject, batch_sizes, choose_memory, free_bytes
from vtk.training.policies import policy

CPU = torch.device("cpu")
MODELS = {
    "sequential": {},
    "odd": {"reg_tokens": 3, "qk_norm": True, "init_values": 0.1, "drop_path_rate": 0.2},
    "parallel": {"block_fn": ParallelThingsBlock, "global_pool": "avg"},
}


def attn_only(model):
    policy.apply(model, policy.select(model, "attn"))
    policy.train_mode(model)
    return model


@pytest.mark.parametrize("regime", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_estimate_is_what_real_tensors_keep(tiny, name, regime):
    model = attn_only(tiny(**MODELS[name], img_size=48))
    add_context_broadcast(model, scale=True, layers="upper")
    policy.apply(model, policy.select(model, "attn"))
    estimates = {f.mode: f for f in footprints(model, (3, 48, 48), regime)}
    assert not any("memory_modes" in m.__dict__ for m in model.modules())
    if regime == "bf16":
        Bf16().prepare(model, [n for n, p in model.named_parameters() if p.requires_grad])
    for mode in MODES:
        apply_memory_mode(model, mode)
        real = {}
        for batch in (2, 5):
            images = torch.randn(batch, 3, 48, 48)
            real[batch] = kept_bytes(lambda i=images: model(i), tensors_of(model))
        assert estimates[mode].image * 3 == real[5] - real[2], mode
    remove_memory_mode(model)


def test_numbers_of_a_vit_small(tiny):
    with shapes_only():
        model = attn_only(timm.create_model("vit_small_patch16_224", num_classes=10, depth=2))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    found = footprints(model, (3, 224, 224), "bf16", 1, ("recompute",))[0]
    assert found.weights == 6 * trained + 2 * frozen
    assert (found.gradients, found.optimizer) == (4 * trained, 4 * trained)
    assert found.units == pytest.approx(6.0, abs=0.1)
    assert found.total(3) - found.total(2) == found.image + found.working


def test_a_model_without_blocks_is_counted_too():
    with shapes_only():
        model = timm.create_model("convnext_atto", num_classes=3, depths=(1, 1, 1, 1))
    policy.apply(model, policy.select(model, "head"))
    found = footprints(model, (3, 64, 64), "fp32", modes=("plain",))[0]
    assert found.units is None and found.total(1) > found.weights


COUNTED = [
    Footprint(mode, kept, 10, None, 50, 1000, 2000, 3000)
    for mode, kept in zip(MODES, (1000, 800, 600, 300), strict=True)
]


def choose(model, monkeypatch, free, images=1000, world=1, **flags):
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    ranks = Ranks(CPU, 0, world)
    return choose_memory([Subject(model, (3, 32, 32))], FinetuneConfig(**flags), "fp32", ranks, images=images)


@pytest.fixture
def counted(monkeypatch):
    """Put round numbers in place of the count."""
    monkeypatch.setattr(memory, "footprints", lambda *args, **_: [f for f in COUNTED if f.mode in args[-1]])


def needs(model, mode, batch):
    """The free memory, its own model apart, into which a mode just fits with head-room."""
    found = next(f for f in COUNTED if f.mode == mode)
    return int(found.total(batch) / 0.9) + 1 - present(model)


def present(model):
    return sum(p.numel() * 4 for p in model.parameters())


def test_auto_takes_the_fastest_mode_that_fits(tiny, monkeypatch, counted):
    model = attn_only(tiny())
    for i, mode in enumerate(MODES):
        free = needs(model, mode, 32)
        assert choose(model, monkeypatch, free).mode == mode
        modes = next(m for m in model.modules() if "memory_modes" in m.__dict__).memory_modes
        assert (modes.ffn, modes.qkv_again) == ("recompute", True) if mode == "minimal" else (mode, False)
        if i:
            assert choose(model, monkeypatch, free, batch_size=16).mode != "minimal"
    remove_memory_mode(model)


def test_auto_says_when_nothing_fits(tiny, monkeypatch, counted, capsys):
    assert choose(attn_only(tiny()), monkeypatch, 0, batch_size=4096).mode == "minimal"
    assert "give a smaller --batch-size" in capsys.readouterr().err


def test_what_flags_settle_is_not_counted(tiny, monkeypatch):
    monkeypatch.setattr(memory, "footprints", None)
    found = choose(attn_only(tiny()), monkeypatch, 0, memory="recompute")
    assert (found.mode, found.batch, found.counted) == ("recompute", 32, ())


def test_a_model_that_cannot_be_counted_trains_by_plain(tiny, monkeypatch, capsys):
    def fails(*args, **_):
        raise RuntimeError("data-dependent\nand more")

    monkeypatch.setattr(memory, "footprints", fails)
    assert choose(attn_only(tiny()), monkeypatch, 1 << 40).mode == "plain"
    err = capsys.readouterr().err
    assert "cannot be counted (RuntimeError: data-dependent)" in err and err.count("\n") == 1
    with pytest.raises(UsageError, match="give --batch-size"):
        choose(attn_only(tiny()), monkeypatch, 1 << 40, batch_size="auto")


def test_auto_says_once_what_attention_only_training_does_without_the_engine(tiny, monkeypatch, capsys):
    swin = attn_only(timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), embed_dim=24))
    assert choose(swin, monkeypatch, 0).mode == "plain"
    err = capsys.readouterr().err
    assert "SwinTransformer has no block the engine knows" in err and err.count("\n") == 1
    model = tiny()
    policy.apply(model, policy.select(model, "full"))
    assert choose(model, monkeypatch, 0, train="full").mode == "plain"
    assert choose(model, monkeypatch, 0, train="full", memory="plain").mode == "plain"
    assert capsys.readouterr().err == ""
    assert choose(model, monkeypatch, 0, train="full", memory="act8").mode == "plain"
    assert "--memory act8 changes nothing: norms are trained" in capsys.readouterr().err


def test_the_largest_batch(tiny, monkeypatch, counted):
    model = attn_only(tiny())
    assert batch_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96] and batch_sizes(0) == [1]
    for mode in ("plain", "minimal"):
        free = needs(model, mode, 48)
        assert choose(model, monkeypatch, free, memory=mode, batch_size="auto").batch == 48
        assert choose(model, monkeypatch, free - 100, memory=mode, batch_size="auto").batch == 32
    assert choose(model, monkeypatch, 1 << 40, batch_size="auto", images=70).batch == 64
    shared = choose(model, monkeypatch, 1 << 40, batch_size="auto", images=70, world=2)
    assert (shared.batch, shared.each) == (64, 32)
    both = choose(model, monkeypatch, needs(model, "minimal", 48), batch_size="auto")
    assert (both.mode, both.batch) == ("minimal", 48)
    with pytest.raises(UsageError, match="one image takes about"):
        choose(model, monkeypatch, -present(model), batch_size="auto")


def test_all_processes_choose_by_the_fullest_device(tiny, monkeypatch, counted):
    model = attn_only(tiny())

    class Fuller(Ranks):
        def gather(self, value):
            return [value, needs(model, "act8", 16) + present(model)]

    monkeypatch.setattr(memory, "free_bytes", lambda device: 1 << 40)
    found = choose_memory([Subject(model, (3, 32, 32))], FinetuneConfig(), "fp32", Fuller(CPU, 0, 2), images=100)
    assert found.mode == "act8"


def test_the_table_fits_a_terminal(tiny, monkeypatch, capsys):
    with shapes_only():
        model = attn_only(timm.create_model("vit_large_patch16_384", depth=1))
    counted = tuple(footprints(model, (3, 384, 384), "fp32"))
    choice = MemoryChoice("act8", 4096, 1, 80 * 10**9, counted, None)
    choice.print()
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "→ act8" in printed and "-" in printed
    told = json.loads(json.dumps(choice.to_dict()))
    assert [m["mode"] for m in told["modes"]] == list(MODES) and told["memory"] == "act8"
    for row in told["modes"]:
        parts = ("constant", "weights", "gradients", "optimizer", "activations")
        assert row["total_bytes"] == sum(row[f"{p}_bytes"] for p in parts)
        assert row["headroom_bytes"] == told["free_bytes"] - row["total_bytes"]


def test_free_bytes():
    assert free_bytes(CPU) > 1 << 20


def test_flags_of_memory_are_checked():
    for flags, words in (({"memory": "tiny"}, "--memory"), ({"batch_size": 0}, "--batch-size"),
                         ({"batch_size": "all"}, "--batch-size")):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            FinetuneConfig(**flags)
