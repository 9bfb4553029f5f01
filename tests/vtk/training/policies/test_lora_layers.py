"""``--train lora``: the factors' formula in fp64, stock PEFT on stock timm, and packs that are packs like any other."""

import importlib
import json
import re
import shutil

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("peft")
from peft import PeftModel

from vtk.__main__ import main
from vtk.bank.bank import TaskBank
from vtk.card import InputSpec
from vtk.data.audit.folder_scan import scan
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.loading.loader import make_loader
from vtk.errors import UsageError
from vtk.models.transforms import registry
from vtk.packs.adapters import called_leaves
from vtk.packs.cards import read_card
from vtk.packs.factor_facts import ranks_of
from vtk.packs.from_peft import from_peft
from vtk.packs.load import load_task
from vtk.packs.to_peft import to_peft
from vtk.training.finetune import finetune, memory_report
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.frozen_ffn.blocks import apply_memory_mode
from vtk.training.frozen_ffn.estimate import footprints
from vtk.training.policies import lora_layers as lora
from vtk.training.policies import policy
from vtk.training.policies.census import take_census
from vtk.training.policies.policy import train_mode

SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2}
TARGETS = [f"blocks.{i}.attn.{leaf}" for i in range(2) for leaf in ("qkv", "proj")]
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A base for 64 px: at 32 px its position table is resampled."""
    torch.manual_seed(7)
    path = tmp_path_factory.mktemp("weights") / "base.safetensors"
    save_file(timm.create_model("vit_tiny_patch16_224", img_size=64, **SMALL).state_dict(), path)
    return path


@pytest.fixture
def low(config, weights):
    """Build a config for a run with factors."""

    def build(**changes):
        values = {"train": "lora", "weights": weights, "pretrained": True, "memory": "plain", "epochs": 1}
        return config(**{**values, **changes})

    return build


def injected(tiny, *, targets=("qkv", "proj"), rank=4, dropout=0.0, seed=0, **kwargs):
    """A model with factors, B not zero, and what is trained by the policy."""
    from vtk.card import ModelSpec
    from vtk.models.create import Created

    spec = InputSpec(32, 32, 3, (0.5,) * 3, (0.5,) * 3, "bicubic", 0.9, "crop")
    model = tiny(**kwargs)
    created = Created(model, ModelSpec("vit_tiny_patch16_224", SMALL), None, spec, (), {}, {})
    config = FinetuneConfig(
        train="lora", lora_rank=rank, lora_targets=targets, lora_dropout=dropout, seed=seed, data="x"
    )
    found = lora.inject(created, config, (), seed=config.seed)
    generator = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        if ".lora_B." in name:
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.05)
    trained = policy.select(model, "lora")
    policy.apply(model, trained)
    return model, found, trained


def measure(path, root, dtype):
    """Top-1 and mean loss of a pack by a loop of its own."""
    task = load_task(path)
    audit = scan(root, classes=task.card.classes, show_progress=False)
    loader = make_loader(audit.val, eval_transform(task.card.input), batch_size=64, shuffle=False, seed=0, workers=0)
    model = task.model.to(dtype)
    with torch.no_grad():
        ((images, labels),) = list(loader)
        log_p = torch.log_softmax(model(images.to(dtype)).double(), dim=1)
    return float((log_p.argmax(1) == labels).double().mean()), float(-log_p[torch.arange(len(labels)), labels].mean())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stock_peft_on_stock_timm_computes_what_the_pack_does(low, photos, weights, tmp_path, precision):
    run = finetune(low(precision=precision, lora_rank=4, lora_alpha=12.0, epochs=2))
    assert {p.name for p in run.adapter.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "base.safetensors", "README.md",
    }  # fmt: skip
    pack, base = load_task(run.task), load_file(weights)
    plain = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3, **SMALL)
    plain.load_state_dict(load_file(run.adapter / "base.safetensors"), strict=True)
    with torch.no_grad():
        alone = plain.eval()(IMAGES)
        theirs = PeftModel.from_pretrained(plain, str(run.adapter)).eval()
        expected = pack.model(IMAGES)
        assert float((alone - expected).abs().max()) > 1e-2  # the adapter does something
        assert torch.allclose(theirs(IMAGES), expected, atol=1e-6)
        merged = theirs.merge_and_unload().eval()
    state = pack.model.state_dict()
    assert all(torch.equal(v, state[k]) for k, v in merged.state_dict().items())  # PEFT's own merge, bit for bit
    tensors = load_file(run.adapter / "adapter_model.safetensors")
    for name in TARGETS:
        a, b = (tensors[f"base_model.model.{name}.lora_{x}.weight"].double() for x in "AB")
        assert a.shape[0] == b.shape[1] == 4
        wanted = base[f"{name}.weight"].double() + 12 / 4 * b @ a
        assert torch.allclose(state[f"{name}.weight"].double(), wanted, atol=1e-7)
    stored = load_file(run.task / "task.safetensors")
    assert set(stored) == {*(f"{n}.weight:{x}" for n in TARGETS for x in "ab"), "head.weight", "head.bias"}
    for name in TARGETS:
        for x in "AB":
            factor = tensors[f"base_model.model.{name}.lora_{x}.weight"]
            assert torch.equal(stored[f"{name}.weight:{x.lower()}"], factor)
    facts = json.loads((run.task / "task.json").read_text())["pack"]["factors"]
    assert {n: f["scale"] for n, f in facts.items() if f["rank"] == 4} == {f"{n}.weight": 3.0 for n in TARGETS}
    assert facts["pos_embed"]["rank"] == 0  # as resampled from the base's
    assert str(ranks_of(read_card(run.task), run.task)) == "4"
    same = [n for n in base if not n.startswith("head.") and n != "pos_embed" and n[: -len(".weight")] not in TARGETS]
    assert len(same) > 20 and all(torch.equal(state[n], base[n]) for n in same)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    top1, loss = measure(run.task, photos, dtype)
    assert run.metrics.top1 == top1 == json.loads((run.task / "task.json").read_text())["metrics"]["top1"]
    assert run.metrics.loss == pytest.approx(loss, abs=1e-12)  # of the merged weights, rounded as others round them
    last = json.loads((run.task_last / "task.json").read_text())["metrics"]
    assert measure(run.task_last, photos, dtype) == (last["top1"], pytest.approx(last["loss"], abs=1e-12))
    # and back
    card = from_peft(run.adapter, tmp_path / "again")
    again = load_file(tmp_path / "again" / "task.safetensors")
    assert torch.equal(again.pop("pos_embed"), state["pos_embed"])  # of the adapter's own base, not of the stored one
    assert again.keys() == stored.keys() and all(torch.equal(again[n], stored[n]) for n in stored)
    assert card.classes == ("blue", "green", "red")


def test_the_readmes_lines_run(low, weights, monkeypatch):
    run = finetune(low(img_size=64))  # at the base's own size the adapter needs no base of its own
    assert not (run.adapter / "base.safetensors").exists()
    (code,) = re.findall(r"```python\n(.*?)```", (run.adapter / "README.md").read_text(), re.DOTALL)
    shutil.copy(weights, run.adapter / "base.safetensors")
    monkeypatch.chdir(run.adapter)
    space: dict = {}
    exec(code, space)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(space["model"](images), load_task(run.task).model(images), atol=1e-6)
    other = {f"model.{name}": tensor for name, tensor in load_file(weights).items()}
    save_file(other, run.adapter / "base.safetensors")
    with pytest.raises(AssertionError, match=r"base\.safetensors lacks \['"):  # nothing would be loaded
        exec(code, {})


def test_one_and_one_epochs_equal_two(low, tmp_path):
    changes = {"precision": "bf16", "lora_dropout": 0.1, "accumulate": 2, "drop_path": 0.2, "epochs": 2}
    whole = finetune(low(out=tmp_path / "whole", **changes))
    finetune(low(out=tmp_path / "parts", stop_after=1, **changes))
    held = load_file(tmp_path / "parts" / "last" / "model.safetensors")
    assert set(held) == {
        "head.weight", "head.bias", *(f"{n}.lora_{x}.default.weight" for n in TARGETS for x in "AB"),
    }  # fmt: skip
    finetune(low(out=tmp_path / "parts", resume=True, **changes))
    for name in ("task/task.safetensors", "task/task.json", "task-last/task.safetensors"):
        assert (whole.out / name).read_bytes() == (tmp_path / "parts" / name).read_bytes(), name
    a, b = (load_file(out / "adapter" / "adapter_model.safetensors") for out in (whole.out, tmp_path / "parts"))
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    with pytest.raises(UsageError, match=r"--lora-rank 4 \(was 8\)"):
        finetune(low(out=tmp_path / "parts", resume=True, **{**changes, "lora_rank": 4}))


@pytest.mark.slow
def test_a_run_whose_pack_is_merged_as_older_versions_wrote_it_goes_on(low, tmp_path):
    changes = {"epochs": 2, "lora_alpha": 12.0}
    whole = finetune(low(out=tmp_path / "whole", **changes))
    run = finetune(low(out=tmp_path / "old", stop_after=1, **changes))
    task, file = load_task(run.task), run.task / "task.safetensors"
    state, facts = task.model.state_dict(), dict(task.card.pack)
    del facts["factors"], facts["start_layout"]
    save_file({name: state[name].contiguous() for name in task.carried}, file)
    card = json.loads((run.task / "task.json").read_text())
    (run.task / "task.json").write_text(json.dumps(card | {"schema": 1, "pack": facts}))
    assert not load_task(run.task).factors
    done = finetune(low(out=tmp_path / "old", resume=True, **changes))
    for name in ("task-last/task.safetensors", "adapter/adapter_model.safetensors"):
        one, two = (load_file(out / name) for out in (whole.out, done.out))
        assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one), name
    with torch.no_grad():
        assert torch.equal(load_task(done.task).model(IMAGES), load_task(whole.task).model(IMAGES))


def test_a_rank_above_every_matrix_is_merged(low):
    run = finetune(low(lora_rank=40))
    assert not load_task(run.task).factors
    stored = set(load_file(run.task / "task.safetensors"))
    assert stored == {*(f"{name}.weight" for name in TARGETS), "head.weight", "head.bias", "pos_embed"}


def test_pack_and_adapter_hold_the_average(low, photos, weights, tmp_path):
    changes = {"epochs": 3, "stop_after": 2, "lora_rank": 2, "batch_size": 12, "precision": "bf16"}
    plain = finetune(low(out=tmp_path / "plain", **changes))
    run = finetune(low(out=tmp_path / "ema", ema=0.9, metric="loss", **changes))
    raw, other = (load_file(done.out / "last" / "model.safetensors") for done in (run, plain))
    assert raw.keys() == other.keys() and all(torch.equal(raw[n], other[n]) for n in raw)  # the training is the same
    assert run.best_epoch == 2  # so that pack and adapter are of the state that is kept
    averages = torch.load(run.out / "last" / "state.pt", weights_only=True)["ema"]["averages"]
    assert averages.keys() == raw.keys() and not any(torch.equal(averages[n], raw[n]) for n in raw)
    adapter, packed = load_file(run.adapter / "adapter_model.safetensors"), load_file(run.task / "task.safetensors")
    base, merged = load_file(weights), load_task(run.task).model.state_dict()
    for name in TARGETS:
        a, b = (averages[f"{name}.lora_{x}.default.weight"] for x in "AB")
        for x, mean in zip("AB", (a, b), strict=True):
            assert torch.equal(adapter[f"base_model.model.{name}.lora_{x}.weight"], mean)
        assert torch.equal(packed[f"{name}.weight:a"], a) and torch.equal(packed[f"{name}.weight:b"], b)
        wanted = base[f"{name}.weight"].double() + 16 / 2 * b.double() @ a.double()
        assert torch.allclose(merged[f"{name}.weight"].double(), wanted, atol=1e-7)
    for name in ("head.weight", "head.bias"):
        assert torch.equal(packed[name], averages[name]) and torch.equal(
            adapter[f"base_model.model.{name}"], packed[name]
        )
    top1, loss = measure(run.task, photos, torch.bfloat16)
    assert run.metrics.top1 == top1 and run.metrics.loss == pytest.approx(loss, abs=1e-12)


def test_a_bank_serves_it_beside_another_pack(low, tmp_path):
    first = finetune(low(out=tmp_path / "a"))
    second = finetune(low(out=tmp_path / "b", train="attn"))
    bank = TaskBank()
    bank.add("a", first.task)
    bank.add("b", second.task)
    found = bank({"a": IMAGES, "b": IMAGES[:1]})
    with torch.no_grad():
        for name, run, count in (("a", first, 3), ("b", second, 1)):
            assert torch.allclose(found[name], load_task(run.task).model(IMAGES[:count]), atol=1e-5)


def test_factors_on_the_ffn_are_said_to_leave_the_bank(low, capsys):
    run = finetune(low(lora_targets=("qkv", "fc1", "fc2"), memory="recompute"))
    said = " ".join(capsys.readouterr().err.split())
    assert "changes layers outside of attention (blocks.0.mlp.fc1, 4 in all)" in said
    assert "FFNs are trained" in said  # so the memory mode cannot help
    with pytest.raises(UsageError, match=r"blocks\.0\.mlp\.fc1"):
        TaskBank().add("a", run.task)


def test_parallel_branches_and_int8_packs(low, photos, tmp_path):
    changes = {"branches": 2, "pack_dtype": "int8", "weights": None, "pretrained": False}
    run = finetune(low(**changes, model_kwargs=("depth=4", "embed_dim=32", "num_heads=2")))
    stored = load_file(run.task / "task.safetensors")
    names = {n for n in stored if n.endswith("qkv.weight:a")}
    assert names == {f"blocks.{i}.attns.{j}.attn.qkv.weight:a" for i in range(2) for j in range(2)}
    assert all(stored[n].dtype == torch.int8 and stored[f"{n}:scale"].shape == (8,) for n in names)
    top1, loss = measure(run.task, photos, torch.float32)
    assert (run.metrics.top1, run.metrics.loss) == (top1, pytest.approx(loss, abs=1e-12))  # of the rounded factors
    made = to_peft(run.task, tmp_path / "peft")
    assert {f"{name}.weight:a" for name in made.ranks if name.endswith("qkv")} == names
    # the branches have other names than the base's tensors, which stock PEFT cannot know
    assert (run.adapter / "base.safetensors").is_file()


def test_census_counts_the_factors(tiny):
    model, _, trained = injected(tiny)
    census = take_census(model, trained, "lora")
    rows = {row.group: row for row in census.rows}
    # per block 4 · (32 + 96) + 4 · (32 + 32) numbers
    assert (rows["lora"].trained, rows["lora"].trained_tensors) == (2 * 4 * (128 + 64), 8)
    assert rows["attention"].trained == rows["position"].trained == 0
    assert census.trained == rows["lora"].trained + 3 * 33


def gradients(model, images):
    model.zero_grad()
    train_mode(model)
    torch.manual_seed(3)
    y = model(images)
    y.square().sum().backward()
    return y.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["plain", "act8", "recompute", "minimal"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_memory_modes_give_autograds_gradients(tiny, mode, dropout):
    model, _, trained = injected(tiny, dropout=dropout, init_values=0.5)
    model.double()
    y, expected = gradients(model, IMAGES.double())
    plan = apply_memory_mode(model, mode)
    assert plan.changed == 2
    assert ("LoRA" in (plan.note or "")) == (mode == "minimal")  # said, not done silently
    again, found = gradients(model, IMAGES.double())
    assert found.keys() == expected.keys() == trained
    assert torch.allclose(again, y, rtol=1e-13, atol=1e-13)
    bound = 4e-3 if mode == "act8" else 1e-12
    for name, grad in expected.items():
        assert float((found[name] - grad).norm() / grad.norm()) <= bound, name


@pytest.mark.parametrize(
    ("name", "targets"),
    [("vit_small_patch16_dinov3_qkvb", ("qkv", "proj")), ("eva02_base_patch16_clip_224", ("q_proj", "v_proj"))],
)
def test_memory_modes_of_eva_give_autograds_gradients(name, targets):
    """With biases beside qkv, and with factors on two of its three layers."""
    sizes = {"embed_dim": 32, "num_heads": 2, "depth": 2, "img_size": 32, "num_classes": 3}
    model, _, trained = injected(lambda **_: timm.create_model(name, **sizes), targets=targets)
    model.double()
    y, expected = gradients(model, IMAGES.double())
    assert expected.keys() == trained
    for mode in ("plain", "recompute", "minimal"):
        plan = apply_memory_mode(model, mode)
        assert plan.changed == 2 and ("LoRA" in (plan.note or "")) == (mode == "minimal")
        again, found = gradients(model, IMAGES.double())
        assert torch.allclose(again, y, rtol=1e-12, atol=1e-12) and found.keys() == trained
        for key, grad in expected.items():
            assert float((found[key] - grad).norm() / grad.norm()) <= 1e-12, (mode, key)


def test_a_layer_that_is_merged_or_switched_off_computes_as_peft_does(tiny):
    model, _, _ = injected(tiny)
    apply_memory_mode(model, "recompute")
    train_mode(model)
    y = model(IMAGES).detach()
    layer = model.blocks[0].attn.qkv
    layer.merge()
    assert torch.allclose(model(IMAGES), y, atol=1e-5)
    layer.unmerge()
    layer.enable_adapters(False)
    off = model(IMAGES).detach()
    assert float((off - y).abs().max()) > 1e-3
    model.blocks[0].attn.qkv = layer.base_layer
    assert torch.allclose(model(IMAGES), off, atol=1e-5)


def test_engine_keeps_less_for_factors_than_autograd(tiny):
    from vtk.training.frozen_ffn.estimate import kept_bytes, tensors_of

    model, _, _ = injected(tiny)
    train_mode(model)

    def each():  # of an image: layers with the norm before them folded in are there once, for all
        one, two = (kept_bytes(lambda n=n: model(IMAGES[:n]), tensors_of(model)) for n in (1, 2))
        return two - one

    plain = each()
    apply_memory_mode(model, "recompute")
    # per token and block, in C: norms 2, input of A 1, qkv 3, output 1, FFN 4; of these norms' input, qkv, output stay
    assert each() < 0.65 * plain


def test_inside_the_context_the_model_is_the_merged_one_and_after_it_the_old_one(tiny):
    model, found, _ = injected(tiny)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        y = model(IMAGES)
        with lora.merged_into(model, found, before):
            assert set(model.state_dict()) == set(tiny().state_dict())
            assert torch.allclose(model(IMAGES), y, atol=1e-5)
        assert torch.equal(model(IMAGES), y)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[n], before[n]) for n in before)


def test_targets_that_are_not_there_are_refused_by_name(tiny):
    with pytest.raises(UsageError, match=r"`--lora-targets` q_proj: .* no linear layer .* qkv, proj, fc1, fc2$"):
        injected(tiny, targets=("q_proj",))
    from timm.models.vision_transformer import ParallelScalingBlock

    with pytest.raises(UsageError, match=r"`--lora-targets` qkv: .*; there are .*attn_out_proj"):
        injected(tiny, block_fn=ParallelScalingBlock)
    bare = nn.Sequential(nn.Conv2d(3, 3, 1))
    with pytest.raises(UsageError, match="it has no linear layers but the classifier"):
        lora.target_modules(bare, ("qkv",), set())


def test_a_weight_that_is_read_and_not_called_is_refused(tiny):
    model = tiny()
    model.blocks[0].attn.forward = lambda x, **_: x @ model.blocks[0].attn.qkv.weight[:32].T
    called = called_leaves(model, InputSpec(32, 32, 3, (0.5,) * 3, (0.5,) * 3, "bicubic", 0.9, "crop"))
    with pytest.raises(UsageError, match=r"reads the weight of blocks\.0\.attn\.qkv without calling it"):
        lora.target_modules(model, ("qkv", "proj"), called)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": "lora", "cb": True}, r"`--cb`: timm has no Context Broadcasting"),
        ({"train": "lora", "cb_scale": True}, r"`--cb-scale`: timm has no"),
        ({"train": "lora", "init_from": ("p",)}, r"`--init-from` .*adapters start from the base"),
        ({"lora_rank": 4}, r"`--lora-rank` needs --train lora, but --train is attn"),
        ({"train": "lora", "lora_rank": 0}, r"`--lora-rank` is 0; allowed is at least 1"),
        ({"train": "lora", "lora_dropout": 1.0}, r"`--lora-dropout` is 1.0"),
        ({"train": "lora", "lora_targets": ()}, r"`--lora-targets` is empty"),
    ],
    ids=["cb", "cb-scale", "init-from", "rank-of-attn", "rank-0", "dropout", "no-targets"],
)
def test_flags_that_contradict(config, changes, message):
    with pytest.raises(UsageError, match=message):
        config(**changes)


CHANGES: dict[str, dict] = {
    "stem": {"stem": "conv"}, "mlp": {"mlp": "bn"}, "msa-blocks": {"msa_blocks": (1,)},
    "local-attention": {"local_attention": 3}, "uniform-heads": {"uniform_heads": "a"},
    "softmax-free": {"softmax_free": True}, "se": {"se": True}, "spatial-smoothing": {"spatial_smoothing": "blur"},
    "extra-block": {"extra_block": "msa"},
}  # fmt: skip


@pytest.mark.parametrize("flag", CHANGES)
def test_every_change_that_timm_cannot_build_is_refused_by_its_flag(flag):
    with pytest.raises(UsageError, match=rf"^`--{flag}`: timm cannot build it, .*; use --train attn$"):
        FinetuneConfig(train="lora", **CHANGES[flag])


def test_no_change_of_the_architecture_is_left_out_of_those():
    """``1proj`` is a ViT's own stem, and parallel branches are timm's; broadcasting has a message of its own."""
    shapes = FinetuneConfig(train="lora", stem="1proj", branches=2).transforms()
    assert [t.op for t in shapes] == ["replace_stem", "parallelize"]
    for module in registry._MODULES:
        importlib.import_module(f"vtk.models.{module}")
    known = {t.op for flags in CHANGES.values() for t in FinetuneConfig(**flags).transforms()}
    assert known == registry._REGISTRY.keys() - {"parallelize", "adapt_input", "add_context_broadcast"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "lvvit_tiny"}, "timm alone has no `lvvit_tiny`"),
        ({"model": "alternet_18_cifar", "img_size": 32}, "timm alone has no `alternet_18_cifar`"),
        ({"model": "volo_d1_224", "stem": "1proj"}, "the model has `replace_stem`, which timm cannot build"),
    ],
)
def test_models_that_timm_cannot_build_are_refused_before_an_image_is_read(changes, named, tmp_path):
    flags = {"train": "lora", "pretrained": False, "data": tmp_path / "nowhere", "out": tmp_path / "run"}
    with pytest.raises(UsageError, match=rf"^`--train lora`: {named}.*; use --train attn$"):
        finetune(FinetuneConfig(**flags, **changes))


def test_the_changes_of_the_weights_are_refused_before_an_image_is_read_too(config, tmp_path):
    free = {"softmax_free": True, "train": "full", "epochs": 1, "out": tmp_path / "free"}
    merged = tmp_path / "merged.safetensors"
    assert main(["tasks", "merge", str(finetune(config(**free)).task), "--out", str(merged)]) == 0
    flags = {"train": "lora", "weights": merged, "data": tmp_path / "nowhere", "out": tmp_path / "run"}
    with pytest.raises(UsageError, match=r"^`--train lora`: the model has `softmax_free`.*; use --train attn$"):
        finetune(FinetuneConfig(**flags))


def test_dry_run_counts_factors_and_fp16(low, tiny):
    flags = {"dry_run": True, "precision": "fp16", "weights": None, "pretrained": False}
    report = memory_report(low(**flags, model_kwargs=("depth=1", "embed_dim=32", "num_heads=2")))
    assert [f.mode for f in report.counted] == ["plain", "act8", "recompute", "minimal"]
    model, _, trained = injected(tiny, rank=8, depth=1)
    count = sum(p.numel() for n, p in model.named_parameters() if n in trained)
    assert {f.optimizer for f in report.counted} == {8 * count}  # two fp32 moments of what is trained
    half, wide = (footprints(model, (3, 32, 32), name, modes=("plain",))[0] for name in ("fp16", "fp32"))
    assert half == footprints(model, (3, 32, 32), "bf16", modes=("plain",))[0]
    assert half.image * 2 == pytest.approx(wide.image, rel=0.05)


def test_sharpness_aware_steps_climb_along_the_factors(tiny):
    """One step of SGD against the two equations of Chen et al. 2022 in fp64; frozen weights stay where they are."""
    from vtk.training.engine.fitting import fit
    from vtk.training.engine.precision import Fp32
    from vtk.training.objectives.base import Batch, Classification
    from vtk.training.step_rules.sam import Ascent

    model, _, trained = injected(tiny, depth=1)
    model.double()
    labels = torch.tensor([0, 1, 2])

    class One:
        sizes = (3,)

        def epoch(self, index):
            yield Batch(IMAGES.double(), labels)

    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    moved = {n: p for n, p in model.named_parameters() if n in trained}

    def gradients():
        train_mode(model)
        loss = torch.nn.functional.cross_entropy(model(IMAGES.double()), labels)
        return torch.autograd.grad(loss, list(moved.values()))

    first = gradients()
    norm = torch.stack([g.norm() for g in first]).norm()
    with torch.no_grad():
        for p, g in zip(moved.values(), first, strict=True):
            p += 0.1 * g / norm
    wanted = {n: before[n] - 0.01 * g for n, g in zip(moved, gradients(), strict=True)}
    with torch.no_grad():
        for n, p in moved.items():
            p.copy_(before[n])
    config = FinetuneConfig(
        epochs=1, optimizer="sgd", momentum=0.0, weight_decay=0.0, clip_grad=0.0, lr=0.01, head_lr_mult=1.0, warmup=0.0,
        smoothing=0.0,
    )  # fmt: skip
    fit(model, Classification(3), [One()], config, Fp32(), step_rule=Ascent(0.1), show_progress=False)
    assert any("lora_A" in n for n in moved)
    for n, p in model.named_parameters():
        assert torch.allclose(p, wanted.get(n, before[n]), rtol=0, atol=1e-9), n
        assert n in wanted or torch.equal(p, before[n]), n
