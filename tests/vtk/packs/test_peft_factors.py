"""Factors from PEFT and to PEFT: A and B stay as they are, α/r is the scale, and PEFT computes what the pack does."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.vtk.packs.test_peft_read import ATTENTION, HEAD, adapter, description
from vtk.__main__ import main
from vtk.card import Card
from vtk.errors import DataError, UsageError
from vtk.models.create import build_model
from vtk.packs import load_task, save_task
from vtk.packs.base_files import stored_base
from vtk.packs.factors import Factors, read_pack
from vtk.packs.from_peft import from_peft
from vtk.packs.to_peft import to_peft

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:Unsupported layer type")
NAMES = [f"blocks.{i}.attn.{leaf}" for i in (0, 1) for leaf in ("qkv", "proj")]
X = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(6))


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"target_modules": ATTENTION, "r": 4, "lora_alpha": 6, **HEAD, **options})


def pair(folder: Path, module: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B as the adapter's file has them."""
    tensors = load_file(folder / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.{module}.lora_{letter}.weight"] for letter in "AB")
    return a, b


# of module to (rank, scale); each once by the paper's formula, not by PEFT's attributes
PLAIN = dict.fromkeys(NAMES, (4, 6 / 4))
KEPT: dict[str, tuple[dict[str, Any], dict[str, tuple[int, float]]]] = {
    "plain": ({}, PLAIN),
    "rsLoRA": ({"use_rslora": True}, dict.fromkeys(NAMES, (4, 6 / math.sqrt(4)))),
    "patterns": (
        {"rank_pattern": {r"blocks\.0\.attn\.qkv": 2}, "alpha_pattern": {"proj": 5}, "use_rslora": True},
        {NAMES[0]: (2, 6 / math.sqrt(2)), NAMES[2]: (4, 3.0), NAMES[1]: (4, 2.5), NAMES[3]: (4, 2.5)},
    ),
    "biases": ({"bias": "lora_only"}, PLAIN),
    "bias of B": ({"lora_bias": True}, PLAIN),
    "some layers": (
        {"target_modules": ["qkv"], "layers_to_transform": [1], "layers_pattern": "blocks"}, {NAMES[2]: (4, 1.5)},
    ),
    "parameters": ({"target_modules": [], "target_parameters": ["attn.proj.weight"]},
                   {NAMES[1]: (4, 1.5), NAMES[3]: (4, 1.5)}),
    "also a convolution": ({"target_modules": ["qkv", "proj"]}, PLAIN),
}  # fmt: skip


@pytest.mark.parametrize(("options", "expected"), KEPT.values(), ids=KEPT)
def test_factors_of_an_adapter_are_in_the_pack_bit_by_bit(
    base_file: Path, small: Any, tmp_path: Path, options: dict[str, Any], expected: dict[str, tuple[int, float]]
) -> None:
    merged = adapter(base_file, small, lora(**options), tmp_path / "a")
    card = from_peft(tmp_path / "a", tmp_path / "pack", base=base_file, described=description(small))
    pack, task, base = read_pack(tmp_path / "pack"), load_task(tmp_path / "pack"), load_file(base_file)
    assert card.schema == 2 and card.pack["dtype"] == "fp32"
    found = {name: (f.rank, f.scale) for name, f in pack.factors.items() if f.rank}
    assert found == {f"{module}.weight": value for module, value in expected.items()}
    state = task.model.state_dict()
    for module, (_, scale) in expected.items():
        a, b = pair(tmp_path / "a", module)
        kept = pack.factors[f"{module}.weight"]
        assert torch.equal(kept.a, a) and torch.equal(kept.b, b)
        wanted = base[f"{module}.weight"].double() + scale * b.double() @ a.double()
        assert float((state[f"{module}.weight"].double() - wanted).abs().max()) <= 1e-6
    with torch.no_grad():
        assert float((task.model(X) - merged(X)).abs().max()) <= 1e-6
    assert "pos_embed" not in pack.dense and pack.factors["pos_embed"].rank == 0


MERGED: dict[str, Callable[[], Any]] = {
    "DoRA": lambda: lora(use_dora=True),
    "a rank that no matrix has": lambda: lora(r=64),
    "LoHa": lambda: peft.LoHaConfig(target_modules=ATTENTION, r=4, **HEAD),
    "VeRA": lambda: peft.VeraConfig(target_modules=ATTENTION, r=4, **HEAD),
}


@pytest.mark.parametrize("config", MERGED.values(), ids=MERGED)
def test_what_is_no_small_product_is_merged_into_an_ordinary_pack(
    base_file: Path, small: Any, tmp_path: Path, config: Callable[[], Any]
) -> None:
    merged = adapter(base_file, small, config(), tmp_path / "a")
    card = from_peft(tmp_path / "a", tmp_path / "pack", base=base_file, described=description(small))
    task = load_task(tmp_path / "pack")
    assert card.schema == 1 and "factors" not in card.pack and not task.factors
    with torch.no_grad():
        assert float((task.model(X) - merged(X)).abs().max()) <= 1e-6


def test_an_adapter_in_bf16_is_a_pack_in_bf16_without_rounding(base_file: Path, small: Any, tmp_path: Path) -> None:
    adapter(base_file, small, lora(), tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(file).items()}, file)
    card = from_peft(tmp_path / "a", tmp_path / "pack", base=base_file, described=description(small))
    pack = read_pack(tmp_path / "pack")
    assert card.pack["dtype"] == "bf16" and "drift" not in card.pack
    for module in NAMES:
        a, b = pair(tmp_path / "a", module)
        kept = pack.factors[f"{module}.weight"]
        assert torch.equal(kept.a, a) and torch.equal(kept.b, b)


def test_pissas_start_is_in_the_factors_as_in_pefts_own_conversion(base_file: Path, small: Any, tmp_path: Path) -> None:
    name, kwargs = small
    model, state = timm.create_model(name, **kwargs), load_file(base_file)
    model.load_state_dict(state)
    wrapped = peft.get_peft_model(model, lora(init_lora_weights="pissa", modules_to_save=None))  # else PEFT loses them
    wrapped.peft_config["default"].init_lora_weights = True
    wrapped.save_pretrained(tmp_path / "start")
    wrapped.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for value in wrapped.parameters():
            if value.requires_grad:
                value += 0.05 * torch.randn_like(value)
    wrapped.save_pretrained(tmp_path / "a")
    wrapped.save_pretrained(tmp_path / "lora", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    states = []
    for folder in ("a", "lora"):
        from_peft(tmp_path / folder, tmp_path / f"{folder}-pack", base=base_file, described=description(small, 1000))
        task = load_task(tmp_path / f"{folder}-pack")
        assert {task.factors[f"{module}.weight"].rank for module in NAMES} == {8}
        states.append(task.model.state_dict())
    for module in NAMES:
        one, two = (found[f"{module}.weight"] for found in states)
        assert float((one - state[f"{module}.weight"]).abs().max()) > 0.01
        assert float((one - two).abs().max()) <= 1e-6


def test_adaloras_singular_values_are_in_a_and_the_pruned_ones_are_gone(
    base_file: Path, small: Any, tmp_path: Path
) -> None:
    config = peft.AdaLoraConfig(target_modules=ATTENTION, init_r=6, target_r=4, total_step=9, lora_alpha=3, **HEAD)
    adapter(base_file, small, config, tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors, base = load_file(file), load_file(base_file)
    key = f"base_model.model.{NAMES[0]}.lora_"
    tensors[f"{key}E"][[1, 4]] = 0
    save_file(tensors, file)
    from_peft(tmp_path / "a", tmp_path / "pack", base=base_file, described=description(small))
    task = load_task(tmp_path / "pack")
    assert [task.factors[f"{module}.weight"].rank for module in NAMES] == [4, 6, 6, 6]
    a, e, b = (tensors[key + letter].double() for letter in "AEB")
    wanted = base[f"{NAMES[0]}.weight"].double() + b @ (a * e) * 3 / (6 + 1e-5)
    assert float((task.model.state_dict()[f"{NAMES[0]}.weight"].double() - wanted).abs().max()) <= 1e-6


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("pissa_niter_2", r"starts from random numbers that it does not hold"),
        ("lora_ga", r"is of LoRA-GA, whose start changed the base by a product that the file does not hold"),
        ("corda", r"is of CorDA, whose start"),
    ],
)
def test_a_start_that_the_file_does_not_hold_is_refused_by_name(
    base_file: Path, small: Any, tmp_path: Path, start: str, message: str
) -> None:
    adapter(base_file, small, lora(), tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": start}))
    with pytest.raises(DataError, match=message) as caught:
        from_peft(tmp_path / "a", tmp_path / "pack", base=base_file, described=description(small))
    assert "\n" not in str(caught.value) and not (tmp_path / "pack").exists()


def test_factors_of_a_classifier_which_no_base_fixes_are_merged(base_file: Path, small: Any, tmp_path: Path) -> None:
    config = lora(target_modules=r"head|blocks\.0\.attn\.qkv", modules_to_save=None)
    merged = adapter(base_file, small, config, tmp_path / "a", classes=1000)
    from_peft(tmp_path / "a", tmp_path / "pack", base=base_file, described=description(small, 1000))
    pack = read_pack(tmp_path / "pack")
    assert {n for n, f in pack.factors.items() if f.rank} == {"blocks.0.attn.qkv.weight"}
    assert torch.equal(pack.dense["head.weight"], merged.state_dict()["head.weight"])


def test_a_table_that_the_stored_base_does_not_have_stays_in_the_pack(
    base_file: Path, small: Any, tmp_path: Path
) -> None:
    """Two files of one base may differ in their position tables; the copy that packs fall back on has the first's."""
    adapter(base_file, small, lora(), tmp_path / "a")
    first = from_peft(tmp_path / "a", tmp_path / "first", base=base_file, described=description(small))
    other = load_file(base_file)
    other["pos_embed"] += 1
    save_file(other, tmp_path / "other.safetensors")
    card = from_peft(tmp_path / "a", tmp_path / "p", base=tmp_path / "other.safetensors", described=description(small))
    assert card.base and first.base and card.base.id == first.base.id
    base_file.unlink()
    (tmp_path / "other.safetensors").unlink()
    assert stored_base(card.base.id).is_file()
    tables = [load_task(tmp_path / name).model.state_dict()["pos_embed"] for name in ("first", "p")]
    assert torch.equal(tables[0] + 1, tables[1])


def compressed(
    base: Path, small: Any, out: Path, *, dtype: Any = "fp32", model: str | None = None, also: Any = (), **options: Any
) -> Path:
    """Write a pack as compression does: other ranks in each matrix, none in one, a low-rank table, exact biases."""
    created = build_model(model or small[0], num_classes=3, img_size=options.pop("img_size", 32), weights=base,
                          kwargs=options.pop("kwargs", small[1]))  # fmt: skip
    state = {name: value.clone() for name, value in created.model.state_dict().items()}
    generator = torch.Generator().manual_seed(9)
    factors, trained = {}, set()
    for i, (name, value) in enumerate(sorted(state.items())):
        if (".attn." in name and value.ndim == 2) or name == "pos_embed":
            rank, scale = (0, 1, 5, 3, 2)[i % 5], (1.0, 0.37)[i % 2]
            a = torch.randn(rank, value.shape[-1], generator=generator)
            b = torch.randn(value[..., 0].numel(), rank, generator=generator) / 9
            factors[name] = Factors(a, b, scale).to(dtype)
            value += factors[name].change().reshape(value.shape)
        elif (".attn." in name and name.endswith(("proj.bias", "qkv.bias"))) or name.startswith("head") or name in also:
            value += torch.randn(value.shape, generator=generator) / 9
        else:
            continue
        trained.add(name)
    card = Card(created.spec, created.input, ("a", "b", "c"))
    save_task(out, state=state, created=created, card=card, trained=trained, factors=factors, dtype=dtype)
    return out


def test_the_line_about_an_adapter_counts_modules_with_factors_and_names_the_others(
    base_file: Path, small: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compressed(base_file, small, tmp_path / "pack")
    assert main(["tasks", "to-peft", str(tmp_path / "pack"), "--out", str(tmp_path / "peft")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    held = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert f"for {sum('lora_A' in name for name in held)} modules of rank " in text
    others = sorted({name.split(".", 2)[2].rpartition(".")[0] for name in held if name.endswith((".weight", ".bias"))
                     and "lora_" not in name and "base_layer" not in name})  # fmt: skip
    assert "head" in others and ", ".join(f"`{name}`" for name in others[:3]) in text


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_mixed_ranks_become_one_lora_adapter_and_come_back(
    base_file: Path, small: Any, tmp_path: Path, dtype: str
) -> None:
    pack = compressed(base_file, small, tmp_path / "pack", dtype=dtype)
    task = load_task(pack)
    ranks = {name.removesuffix(".weight"): f.rank for name, f in task.factors.items() if ".attn." in name}
    assert len(set(ranks.values())) > 2 and 0 in ranks.values()  # else this shows nothing
    made = to_peft(pack, tmp_path / "peft")
    assert made.tuner == "LORA" and made.in_base == ("pos_embed",)
    # a layer without a change has factors of zeros, for its bias
    assert made.ranks == {module: rank or 1 for module, rank in ranks.items()}
    with safe_open(tmp_path / "peft" / "adapter_model.safetensors", "pt") as file:
        card = json.loads(file.metadata()["vtk_peft"])  # of no pack, so that an older vtk reads it
    assert card["schema"] == 1 and "factors" not in card["pack"]
    # stock PEFT on stock timm, without anything of ours
    name, kwargs = small
    plain = timm.create_model(name, num_classes=3, img_size=32, **kwargs)
    plain.load_state_dict(load_file(tmp_path / "peft" / "base.safetensors"), strict=True)
    x = X[..., :32, :32]
    with torch.no_grad():
        wrapped = peft.PeftModel.from_pretrained(plain, str(tmp_path / "peft")).eval()
        assert float((wrapped(x) - task.model(x)).abs().max()) <= 1e-5
        merged = wrapped.merge_and_unload().state_dict()
    state, base = task.model.state_dict(), load_file(base_file)
    for key, value in merged.items():
        assert float((value - state[key]).abs().max()) <= (1e-6 if key in task.factors else 0.0), key
    for module, rank in ranks.items():
        a, b = pair(tmp_path / "peft", module)
        own = task.factors[f"{module}.weight"]
        if rank:
            wide = [t.double() for t in (own.a, own.b)]
            if own.a_scale is not None and own.b_scale is not None:
                wide = [wide[0] * own.a_scale.double()[:, None], wide[1] * own.b_scale.double()]
            exact = base[f"{module}.weight"].double() + own.scale * wide[1] @ wide[0]
            assert float((state[f"{module}.weight"].double() - exact).abs().max()) <= 1e-6
            assert dtype == "int8" or (torch.equal(a, own.a) and torch.equal(b, own.b))
        else:
            assert not a.any() and not b.any()
    from_peft(tmp_path / "peft", tmp_path / "again")
    again = load_task(tmp_path / "again")
    kept = {n: f for n, f in again.factors.items() if f.rank}
    assert kept.keys() == {n for n, f in task.factors.items() if f.rank and n != "pos_embed"}
    for n, f in kept.items():
        assert (f.rank, f.scale) == (task.factors[n].rank, pytest.approx(task.factors[n].scale, rel=1e-15))
    assert dtype == "int8" or all(torch.equal(f.a, task.factors[n].a) for n, f in kept.items())
    assert again.card.base and task.card.base and again.card.base.id == task.card.base.id
    for key, value in again.model.state_dict().items():
        assert float((value - state[key]).abs().max()) <= 1e-6, key


def test_layers_that_eva_reads_without_calling_are_targets_too(small: Any, tmp_path: Path, monkeypatch: Any) -> None:
    kwargs = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    torch.manual_seed(3)
    model = timm.create_model("vit_small_patch16_dinov3_qkvb", num_classes=3, img_size=32, **kwargs)
    save_file({k: torch.randn_like(v) * 0.2 for k, v in model.state_dict().items()}, tmp_path / "base.safetensors")
    pack = compressed(
        tmp_path / "base.safetensors", small, tmp_path / "pack", model="vit_small_patch16_dinov3_qkvb", kwargs=kwargs
    )
    task = load_task(pack)
    made = to_peft(pack, tmp_path / "peft")
    assert set(made.ranks) >= {n.removesuffix(".weight") for n, f in task.factors.items() if f.rank}
    assert all(name.endswith(("q_bias", "v_bias")) for name in made.in_base)
    monkeypatch.chdir(tmp_path / "peft")
    (code,) = [part.split("```")[0] for part in (tmp_path / "peft" / "README.md").read_text().split("```python\n")[1:]]
    space: dict[str, Any] = {}
    exec(code, space)
    x = X[..., :32, :32]
    with torch.no_grad():
        wanted = task.model(x)
        assert float((space["model"](x) - wanted).abs().max()) <= 1e-5
        space["model"].base_model.disable_adapter_layers()
        assert float((space["model"](x) - wanted).abs().max()) >= 1e-3


def test_a_module_whose_name_ends_others_names_is_stored_alone(base_file: Path, small: Any, tmp_path: Path) -> None:
    """PEFT takes `modules_to_save` for ends of names: `norm` would also be every `q_norm`."""
    kwargs = {**small[1], "qk_norm": True}
    torch.manual_seed(2)
    save_file(timm.create_model(small[0], **kwargs).state_dict(), tmp_path / "qk.safetensors")
    pack = compressed(tmp_path / "qk.safetensors", small, tmp_path / "pack", kwargs=kwargs, also=("norm.weight",))
    made = to_peft(pack, tmp_path / "peft")
    held = set(load_file(tmp_path / "peft" / "adapter_model.safetensors"))
    assert "norm" in made.modules and {n for n in held if "norm" in n} == {
        "base_model.model.norm.weight", "base_model.model.norm.bias",
    }  # fmt: skip


def test_adapter_only_holds_all_of_a_lora_pack_and_fits_the_base_itself(
    base_file: Path, small: Any, tmp_path: Path
) -> None:
    adapter(base_file, small, lora(modules_to_save=["head", "norm"]), tmp_path / "a")
    shutil.copy(base_file, tmp_path / "a" / "base.safetensors")
    from_peft(tmp_path / "a", tmp_path / "pack", described=description(small))
    made = to_peft(tmp_path / "pack", tmp_path / "b", adapter_only=True)
    assert made.modules == (*sorted(NAMES), "head", "norm") and made.base_bytes == 0
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in "ab")
    assert first.keys() == second.keys() and all(torch.equal(value, second[key]) for key, value in first.items())
    with pytest.raises(UsageError, match="no adapter of PEFT can hold `pos_embed`"):
        to_peft(compressed(base_file, small, tmp_path / "table"), tmp_path / "c", adapter_only=True)
