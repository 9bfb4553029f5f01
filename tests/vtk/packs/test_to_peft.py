"""To PEFT: stock timm and stock PEFT compute what the pack does, and what no adapter holds is in the base."""

import builtins
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file

from vtk.card import Transform
from vtk.errors import UnavailableError, UsageError, VerificationError
from vtk.packs import load_task
from vtk.packs import to_peft as module
from vtk.packs.adapters import exact_pattern
from vtk.packs.bundle import bundle_task
from vtk.packs.from_peft import from_peft
from vtk.packs.to_peft import to_peft

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:Unsupported layer type")
Make = Callable[..., Path]
BRANCHES = (Transform("parallelize", {"branches": 2}),)
OPTIONS: dict[str, dict[str, Any]] = {
    "attention": {},
    "stem": {"in_chans": 1},
    "branches": {"transforms": BRANCHES},
    "qk-norm, LayerScale": {"kwargs": {"qk_norm": True, "init_values": 0.1}},
    "everything": {"moved": lambda key: True},
    "head": {"moved": lambda key: key.startswith("head")},
    "wide": {"img_size": (32, 64)},
}


def run_readme(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the code of README.md as it stands, in its folder, and return the model."""
    monkeypatch.chdir(folder)
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text("utf-8"), re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["model"]


def images(card: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    spec = card.input
    return torch.randn(3, spec.in_chans, *spec.size, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_code_of_the_readme_gives_the_packs_logits(
    make_pack: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    pack = make_pack(**options)
    made = to_peft(pack, tmp_path / "peft")
    task = load_task(pack)
    assert sorted(p.name for p in made.path.iterdir()) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors", "base.safetensors",
    ]  # fmt: skip
    model, x = run_readme(made.path, monkeypatch), images(task.card, torch.float64)
    assert type(model).__name__ == "PeftModel"
    with torch.no_grad():
        assert float((model(images(task.card)) - task.model(images(task.card))).abs().max()) <= 1e-6
        wanted = task.model.double()(x)
        assert torch.equal(model.double()(x), wanted)
        merged = model.merge_and_unload()
        assert torch.equal(merged(x), wanted)
    assert type(merged).__module__ == "timm.models.vision_transformer"
    assert made.max_difference <= 1e-6

    card = from_peft(made.path, tmp_path / "again")
    back = load_task(tmp_path / "again")
    assert (card.model, card.input, card.classes, card.transforms) == (
        task.card.model, task.card.input, task.card.classes, task.card.transforms,
    )  # fmt: skip
    assert all(torch.equal(v.double(), task.model.state_dict()[k]) for k, v in back.model.state_dict().items())


def test_the_adapter_holds_attention_and_head_and_the_base_the_rest(
    make_pack: Make, base_file: Path, tmp_path: Path
) -> None:
    pack = make_pack()
    made = to_peft(pack, tmp_path / "peft")
    assert made.modules == (*(f"blocks.{i}.attn.{n}" for i in (0, 1) for n in ("proj", "qkv")), "head")
    assert made.in_base == ("pos_embed",)
    base, written, state = (
        load_file(base_file),
        load_file(made.path / "base.safetensors"),
        load_task(pack).model.state_dict(),
    )
    for key, value in written.items():
        whose = state if key in ("pos_embed", "head.weight", "head.bias") else base
        assert torch.equal(value, whose[key]), key


def test_adapter_only_is_for_packs_that_an_adapter_can_hold(
    make_pack: Make, base_file: Path, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = make_pack()
    with pytest.raises(UsageError, match=r"`--adapter-only`: no adapter of PEFT can hold `pos_embed`"):
        to_peft(pack, tmp_path / "peft", adapter_only=True)
    assert not (tmp_path / "peft").exists()
    with pytest.raises(UsageError, match="parallel branches"):
        to_peft(make_pack("p", transforms=BRANCHES), tmp_path / "peft", adapter_only=True)
    fits = make_pack("fits", moved=lambda k: ".attn." in k or k.startswith("head"), img_size=224)
    made = to_peft(fits, tmp_path / "peft", adapter_only=True)
    assert made.base_bytes == 0 and not (made.path / "base.safetensors").exists()
    (made.path / "base.safetensors").write_bytes(base_file.read_bytes())  # as its README says
    model, task = run_readme(made.path, monkeypatch), load_task(fits)
    with torch.no_grad():
        assert torch.equal(model(images(task.card)), task.model(images(task.card)))
    from_peft(made.path, tmp_path / "again")
    again = load_task(tmp_path / "again")
    assert again.base and task.base and again.base.ref.id == task.base.ref.id and again.carried >= task.carried


def test_a_bundle_and_an_int8_pack_do_as_well(make_pack: Make, base_file: Path, tmp_path: Path) -> None:
    bundle_task(make_pack(dtype="int8"), tmp_path / "b")
    base_file.unlink()
    assert to_peft(tmp_path / "b", tmp_path / "peft").max_difference <= 1e-6
    with pytest.raises(UsageError, match="exists; choose another name, or --overwrite"):
        to_peft(tmp_path / "b", tmp_path / "peft")
    to_peft(tmp_path / "b", tmp_path / "peft", overwrite=True)


def test_context_broadcasting_is_refused(make_pack: Make, tmp_path: Path) -> None:
    pack = make_pack(transforms=(Transform("add_context_broadcast", {}),))
    with pytest.raises(UsageError, match="`add_context_broadcast`, which timm cannot build"):
        to_peft(pack, tmp_path / "peft")


def test_weights_that_a_model_reads_without_calling_the_module_go_to_the_base(
    make_pack: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT swaps modules when they are called; `x @ module.weight` would silently see the base's."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ self.fc1.weight.T @ self.fc2.weight.T

    monkeypatch.setattr(timm.layers.Mlp, "forward", forward)
    pack = make_pack(moved=lambda key: True)
    made = to_peft(pack, tmp_path / "peft")
    assert "blocks.0.mlp.fc1.weight" in made.in_base and "blocks.0.mlp.fc1" not in made.modules

    def both(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.fc1(x)
        return x @ self.fc1.weight.T @ self.fc2.weight.T

    monkeypatch.setattr(timm.layers.Mlp, "forward", both)
    with pytest.raises(VerificationError, match="does not compute what the pack does"):
        to_peft(pack, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_without_peft_it_says_what_to_install(make_pack: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "peft":
            raise ImportError("No module named 'peft'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnavailableError, match=r"pip install peft$"):
        module.to_peft(tmp_path, tmp_path / "peft")


def test_the_pattern_fits_exactly_the_chosen_modules() -> None:
    names = ["blocks.0.attn.qkv", "blocks.1.attn.qkv", "blocks.10.attn.qkv", "patch_embed.proj", "head", "head_dist"]
    assert exact_pattern(["blocks.0.attn.qkv", "blocks.1.attn.qkv", "blocks.10.attn.qkv", "head"], names) == (
        r"blocks\.\d+\.attn\.qkv|head"
    )
    some = exact_pattern(["blocks.1.attn.qkv"], names)
    assert [n for n in names if re.fullmatch(some, n)] == ["blocks.1.attn.qkv"]
