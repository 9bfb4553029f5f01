"""From PEFT: packs whose logits are those of the model that PEFT itself merges, and clear words for what cannot be."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from vtk.card import Transform
from vtk.errors import DataError, UsageError
from vtk.packs import expressions, load_task, read_card
from vtk.packs.from_peft import ModelDescription, from_peft
from vtk.packs.to_peft import to_peft

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:Unsupported layer type")
Make = Callable[..., Path]
ATTENTION = r"blocks\.\d+\.attn\.(qkv|proj)"
HEAD = {"modules_to_save": ["head"]}
CONFIGS: dict[str, Callable[[], Any]] = {
    "ln-tuning": lambda: peft.LNTuningConfig(target_modules=ATTENTION, **HEAD),
    "ln-tuning of norms": lambda: peft.LNTuningConfig(target_modules=r".*\.norm[12]|norm|head"),
    "lora": lambda: peft.LoraConfig(target_modules=ATTENTION, r=4, **HEAD),
    "patterns": lambda: peft.LoraConfig(
        target_modules=["qkv", "proj", "fc1"], exclude_modules=["patch_embed.proj"], r=4, lora_alpha=3, use_rslora=True,
        rank_pattern={r"blocks\.0\.attn\.qkv": 2}, alpha_pattern={r"blocks\.1\.attn\.proj": 9}, **HEAD,
    ),
    "convolution": lambda: peft.LoraConfig(target_modules=["qkv", "proj"], r=4, **HEAD),
    "bias all": lambda: peft.LoraConfig(target_modules=ATTENTION, r=4, bias="all", **HEAD),
    "bias lora_only": lambda: peft.LoraConfig(target_modules=ATTENTION, r=4, bias="lora_only", **HEAD),
    "modules": lambda: peft.LoraConfig(
        target_modules=r"blocks\.0\.attn\.qkv", r=2, modules_to_save=["attn.proj", "norm", "head"]
    ),
    "dora": lambda: peft.LoraConfig(target_modules=ATTENTION, r=4, use_dora=True, **HEAD),
    "loha": lambda: peft.LoHaConfig(target_modules=ATTENTION, r=4, **HEAD),
    "ia3": lambda: peft.IA3Config(target_modules=ATTENTION, feedforward_modules=[], **HEAD),
}  # fmt: skip


def adapter(base: Path, small: Any, config: Any, out: Path, classes: int = 3, **options: Any) -> torch.nn.Module:
    """Save an adapter with random weights and return the model that PEFT merges it into."""
    name, kwargs = small
    model = timm.create_model(name, num_classes=classes, **kwargs | {"img_size": 224} | options)
    state = load_file(base)
    head = {} if state["head.weight"].shape[0] == classes else {"head.weight", "head.bias"}
    model.load_state_dict({k: v for k, v in state.items() if k not in head}, strict=False)
    wrapped = peft.get_peft_model(model, config)
    torch.manual_seed(2)
    with torch.no_grad():
        for value in wrapped.parameters():
            if value.requires_grad:
                value += 0.05 * torch.randn_like(value)
    wrapped.save_pretrained(out)
    return wrapped.eval().merge_and_unload().eval()


def description(small: Any, classes: int = 3, **options: Any) -> ModelDescription:
    return ModelDescription(
        model=small[0], model_kwargs=small[1], classes=tuple(f"c{i}" for i in range(classes)), img_size=224, **options
    )


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_pack_computes_what_peft_merges(
    base_file: Path, small: Any, tmp_path: Path, config: Callable[[], Any]
) -> None:
    merged = adapter(base_file, small, config(), tmp_path / "a")
    card = from_peft(tmp_path / "a", tmp_path / "pack", base=base_file, described=description(small))
    task, x = load_task(tmp_path / "pack"), torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        assert float((task.model(x) - merged(x)).abs().max()) <= 1e-6
    assert card.classes == ("c0", "c1", "c2") and card.metrics == {} and "peft" in card.versions
    assert set(card.pack["trained"]) <= task.carried
    assert not any(k.endswith("fc2.weight") for k in card.pack["trained"])


def test_a_card_tells_the_model_and_the_base_may_have_branches(
    make_pack: Make, small: Any, base_file: Path, tmp_path: Path
) -> None:
    like = make_pack(
        "like", transforms=(Transform("parallelize", {"branches": 2}),), moved=lambda k: k.startswith("head")
    )
    to_peft(like, tmp_path / "peft")
    base = tmp_path / "peft" / "base.safetensors"
    model = load_task(like).model
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=r".*\.attn\.qkv", r=2))
    torch.nn.init.normal_(wrapped.base_model.model.blocks[0].attns[1].attn.qkv.lora_B["default"].weight)
    wrapped.save_pretrained(tmp_path / "lora")
    from_peft(tmp_path / "lora", tmp_path / "pack", base=base, described=ModelDescription(card=like))
    task, x = load_task(tmp_path / "pack"), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert float((task.model(x) - wrapped.merge_and_unload()(x)).abs().max()) <= 1e-6
    assert set(task.card.pack["trained"]) == {"blocks.0.attns.1.attn.qkv.weight"}
    assert read_card(like).transforms == task.card.transforms


def lora(**options: Any) -> Any:
    return peft.LoraConfig(target_modules=ATTENTION, r=2, **options)


def edit(key: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | {key: value}))

    return change


def rename(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    first = sorted(tensors)[0]
    save_file({k.replace("lora_A", "lora_Z") if k == first else k: v for k, v in tensors.items()},
              folder / "adapter_model.safetensors")  # fmt: skip


def spoil(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({k: v * torch.nan for k, v in load_file(file).items()}, file)


def cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


@pytest.fixture(scope="module")
def whole(shared_base: Path, small: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("adapter")
    adapter(shared_base, small, lora(**HEAD), out)
    return out


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "adapter_config.json").unlink(), "is not an adapter: it has no adapter_config.json"),
        (lambda f: (f / "adapter_config.json").write_text("{"), "is not valid JSON"),
        (lambda f: (f / "adapter_config.json").write_text("[]"), "names no `peft_type`"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "there is no file"),
        (cut, "not a whole safetensors file"),
        (pickled, "holds a pickle"),
        (rename, "also needs `.*lora_A"),
        (spoil, "not finite"),
        (edit("peft_type", "TELEPORT"), "has no tuner 'TELEPORT'; upgrade peft"),
        (edit("peft_type", "PROMPT_TUNING"), r"PEFT cannot put .*\(PROMPT_TUNING\)"),
        (edit("target_modules", "layers.*q_proj"), r"PEFT cannot put .*\(LORA\).*No modules were targeted|not found"),
        (edit("target_modules", r"blocks\.0\.attn\.qkv"), "has no place for"),
        (edit("r", 3), "PEFT cannot put .* is the base right"),
    ],
)
def test_a_hostile_adapter_is_one_clear_error(
    whole: Path, base_file: Path, small: Any, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    shutil.copytree(whole, tmp_path / "a")
    damage(tmp_path / "a")
    with pytest.raises(DataError, match=message) as caught:
        from_peft(tmp_path / "a", tmp_path / "pack", base=base_file, described=description(small))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "pack").exists()


def test_an_adapter_of_another_model_or_base_is_refused(base_file: Path, small: Any, tmp_path: Path) -> None:
    name, kwargs = small
    adapter(base_file, small, lora(**HEAD), tmp_path / "a")
    wider = (name, kwargs | {"embed_dim": 96})
    torch.manual_seed(4)
    save_file(timm.create_model(name, **wider[1]).state_dict(), tmp_path / "wide.safetensors")
    with pytest.raises(DataError, match="size mismatch"):
        from_peft(tmp_path / "a", tmp_path / "p", base=tmp_path / "wide.safetensors", described=description(wider))
    with pytest.raises(DataError, match="at least 90 % must match"):
        from_peft(tmp_path / "a", tmp_path / "p", base=tmp_path / "wide.safetensors", described=description(small))
    with pytest.raises(DataError, match="size mismatch"):
        from_peft(tmp_path / "a", tmp_path / "p", base=base_file, described=description(small, 5))
    adapter(base_file, small, lora(), tmp_path / "headless")
    with pytest.raises(DataError, match=r"neither .* nor its base has `head.weight` for 3 classes"):
        from_peft(tmp_path / "headless", tmp_path / "p", base=base_file, described=description(small))
    from_peft(tmp_path / "headless", tmp_path / "p", base=base_file, described=description(small, 1000))


def test_a_whole_attention_module_under_ln_tuning_cannot_be_merged(base_file: Path, small: Any, tmp_path: Path) -> None:
    adapter_config = peft.LNTuningConfig(target_modules=r"blocks\.\d+\.attn", **HEAD)
    model = timm.create_model(small[0], num_classes=3, **small[1])
    peft.get_peft_model(model, adapter_config).save_pretrained(tmp_path / "a")
    with pytest.raises(DataError, match=r"PEFT cannot merge .*\(LN_TUNING\)"):
        from_peft(tmp_path / "a", tmp_path / "p", base=base_file, described=description(small))


def test_an_incomplete_description_of_the_model_is_refused(
    make_pack: Make, base_file: Path, small: Any, tmp_path: Path
) -> None:
    adapter(base_file, small, lora(**HEAD), tmp_path / "a")
    call = lambda described=None, base=base_file: from_peft(  # noqa: E731
        tmp_path / "a", tmp_path / "p", base=base, described=described
    )
    with pytest.raises(UsageError, match="does not name its model; give --card PACK, or --model NAME"):
        call()
    with pytest.raises(UsageError, match="give --classes"):
        call(ModelDescription(model=small[0]))
    with pytest.raises(UsageError, match="go with --model"):
        call(ModelDescription(classes=("a",)))
    with pytest.raises(UsageError, match="a name occurs twice"):
        call(ModelDescription(model=small[0], classes=("a", "a")))
    with pytest.raises(UsageError, match="give one of them"):
        call(ModelDescription(model=small[0], classes=("a", "b"), card=tmp_path))
    with pytest.raises(UsageError, match=r"has no base.safetensors; give the weights .* --base FILE"):
        call(description(small), None)
    cb = make_pack(transforms=(Transform("add_context_broadcast", {}),))
    with pytest.raises(UsageError, match="`add_context_broadcast`, which timm cannot build"):
        call(ModelDescription(card=cb))


def test_an_adapter_with_an_expression_that_takes_for_ever_is_refused(
    whole: Path, base_file: Path, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expressions, "_SECONDS", 0.15)
    shutil.copytree(whole, tmp_path / "a")
    edit("target_modules", r"(([a-z0-9.])+)+!")(tmp_path / "a")
    with pytest.raises(DataError, match="regular expression that does not finish"):
        from_peft(tmp_path / "a", tmp_path / "pack", base=base_file, described=description(small))
    assert not (tmp_path / "pack").exists()
