"""LoRA on families that name or use their projections otherwise: targets, gradients, and stock PEFT."""

import re

import pytest
import timm
import torch
from safetensors.torch import save_file

pytest.importorskip("peft")

from tests.vtk.models.test_dinov3_weights import weights as meta_weights
from vtk.card import InputSpec, ModelSpec
from vtk.models.create import Created
from vtk.models.meta_model import shapes_only
from vtk.packs.from_peft import from_peft
from vtk.packs.load import load_task
from vtk.packs.lora_adapter import has_timms_names
from vtk.training.finetune import finetune
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.frozen_ffn.blocks import apply_memory_mode
from vtk.training.policies import lora_layers as lora
from vtk.training.policies import policy

SMALL = {"depth": 1, "embed_dim": 32, "num_heads": 2}
SPLIT = {f"blocks.0.attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj", "proj")}
WHOLE = {"blocks.0.attn.qkv", "blocks.0.attn.proj"}
FAMILIES = {
    "vit_small_patch16_dinov3": WHOLE,
    "vit_small_plus_patch16_dinov3_qkvb": WHOLE,
    "vit_base_patch16_sapiens2": SPLIT,
    "eva02_tiny_patch14_224": WHOLE,
    "eva02_base_patch14_224": SPLIT,
    "beit_base_patch16_224": WHOLE,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_factors_of_the_default_targets_are_in_every_projection_and_count(name):
    torch.manual_seed(0)
    more = {"num_kv_heads": 1} if "sapiens" in name else {}
    model = timm.create_model(name, num_classes=3, img_size=28 if "14" in name else 32, **SMALL, **more)
    side = 28 if "14" in name else 32
    spec = InputSpec(side, side, 3, (0.5,) * 3, (0.5,) * 3, "bicubic", 0.9, "crop")
    images = torch.randn(2, 3, side, side)
    with torch.no_grad():
        before = model.eval()(images)
    created = Created(model, ModelSpec(name, {**SMALL, **more}), None, spec, (), {}, {})
    found = lora.inject(created, FinetuneConfig(train="lora", data="x"), (), seed=0)
    assert set(found.modules) == FAMILIES[name]
    assert torch.allclose(model(images), before, rtol=1e-5, atol=1e-6)  # B is zero
    for n, p in model.named_parameters():
        if ".lora_B." in n:
            p.data.normal_(std=0.1)
    policy.apply(model, policy.select(model, "lora"))
    wanted = gradients(model.double(), images.double())
    assert {found.factors(module)[1] for module in found.modules} <= {n for n, g in wanted.items() if g.norm() > 0}
    apply_memory_mode(model, "recompute")
    again = gradients(model, images.double())
    for n, gradient in wanted.items():
        assert float((again[n] - gradient).norm() / gradient.norm()) < 1e-12, n


def gradients(model, images):
    """Return the gradients of the trained parameters in train mode."""
    model.zero_grad()
    policy.train_mode(model)
    model(images).square().sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def test_names_of_whole_matrices_stand_for_their_parts_and_the_error_lists_what_there_is():
    with shapes_only():
        model = timm.create_model("eva02_base_patch14_224", num_classes=3, **SMALL)
    called = {name for name, _ in model.named_modules()}
    found = lora.target_modules(model, ("fc1", "v_proj"), called)
    assert set(found) == {"blocks.0.mlp.fc1_g", "blocks.0.mlp.fc1_x", "blocks.0.attn.v_proj"}
    with pytest.raises(lora.UsageError, match=r"there are q_proj, k_proj, v_proj, proj, fc1_g, fc1_x, fc2$"):
        lora.target_modules(model, ("kv",), called)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_small_plus_patch16_dinov3_qkvb", "eva02_base_patch14_224"])
def test_the_readmes_lines_load_the_adapter_of_a_run_and_it_becomes_a_pack_again(name, config, tmp_path, monkeypatch):
    side = 28 if "14" in name else 32
    kwargs = tuple(f"{key}={value}" for key, value in SMALL.items())
    weights = tmp_path / "base.safetensors"
    torch.manual_seed(4)
    model = timm.create_model(name, img_size=2 * side, num_classes=3, **SMALL)
    # DINOv3's LayerScale of 1e-5 would hide what the factors do
    save_file({k: torch.randn_like(v) * 0.2 for k, v in model.state_dict().items()}, weights)
    changes = {"train": "lora", "weights": weights, "pretrained": True, "lr": 0.02, "memory": "plain"}
    run = finetune(config(model=name, model_kwargs=kwargs, img_size=side, **changes))
    if not (run.adapter / "base.safetensors").exists():  # without a position table it starts from the base itself
        (run.adapter / "base.safetensors").write_bytes(weights.read_bytes())
    (code,) = re.findall(r"```python\n(.*?)```", (run.adapter / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(run.adapter)
    space: dict = {}
    exec(code, space)
    images, pack = torch.randn(2, 3, side, side), load_task(run.task)
    with torch.no_grad():
        assert torch.allclose(space["model"](images), pack.model(images), rtol=1e-4, atol=1e-4)
        space["model"].base_model.disable_adapter_layers()
        assert not torch.allclose(space["model"](images), pack.model(images), rtol=1e-2, atol=1e-2)
    from_peft(run.adapter, tmp_path / "again")
    again = load_task(tmp_path / "again").model.state_dict()
    assert all(torch.equal(value, again[key]) for key, value in pack.model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "names", "is_timms"),
    [
        ("base.safetensors", {"a", "b", "head"}, True),
        ("base.safetensors", {"a", "head"}, False),  # other names, such as transformers'
        ("base.pth", {"a", "b"}, False),  # safetensors does not read it
        ("random:0", None, False),
    ],
)
def test_an_adapter_goes_without_a_base_only_if_the_base_is_a_file_that_its_readme_can_load(
    name, names, is_timms, tmp_path
):
    if names:
        save = torch.save if name.endswith(".pth") else save_file
        save({n: torch.zeros(1) for n in names}, tmp_path / name)
    source = str(tmp_path / name) if names else name
    assert has_timms_names(source, {"a", "b"}) is is_timms


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["Meta's", "random"])
def test_an_adapter_trained_from_weights_in_another_layout_has_its_base_beside_it(
    layout, config, tmp_path, monkeypatch
):
    changes = {"weights": None, "pretrained": False}
    if layout == "Meta's":
        torch.save(meta_weights(), tmp_path / "meta.pth")
        changes = {"weights": tmp_path / "meta.pth", "pretrained": True}
    kwargs = ("depth=2", "embed_dim=32", "num_heads=2", "mlp_ratio=2")
    name = "vit_small_patch16_dinov3_qkvb"
    run = finetune(config(model=name, model_kwargs=kwargs, img_size=32, train="lora", lr=0.02, **changes))
    (code,) = re.findall(r"```python\n(.*?)```", (run.adapter / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(run.adapter)
    space: dict = {}
    exec(code, space)
    images, pack = torch.randn(2, 3, 32, 32), load_task(run.task)
    with torch.no_grad():
        assert torch.allclose(space["model"](images), pack.model(images), rtol=1e-4, atol=1e-5)
    ref = load_task(run.task).card.base
    from_peft(run.adapter, tmp_path / "again")
    assert load_task(tmp_path / "again").card.base.id == ref.id
