"""Packs that hold factors: what is stored, read and merged."""

import timm
import torch
from safetensors.torch import save_file

from vtk.card import Card
from vtk.models.create import build_model
from vtk.packs.factors import Factors, read_pack
from vtk.packs.load import load_task
from vtk.packs.pack import save_task

NAME = "vit_tiny_patch16_224"


def test_a_full_rank_change_is_lossless() -> None:
    change = torch.randn(48, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert (Factors.of(change).change(torch.float64) - change).abs().max() < 1e-12


def test_int8_of_scaled_factors_keeps_one_scale_for_each_component() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = Factors(torch.randn(4, 16, generator=generator), torch.randn(48, 4, generator=generator), 0.5)
    coded = exact.to("int8")
    assert coded.a.dtype == torch.int8
    assert coded.nbytes == 4 * (16 + 48) + 2 * 4 * 4
    relative = (coded.change() - exact.change()).norm() / exact.change().norm()
    assert relative < 0.02


def test_a_pack_of_factors_is_its_base_plus_the_changes(tmp_path) -> None:
    torch.manual_seed(0)
    save_file(timm.create_model(NAME, num_classes=0, depth=2).state_dict(), tmp_path / "base.safetensors")
    created = build_model(
        NAME, num_classes=3, img_size=96, kwargs={"depth": 2}, weights=tmp_path / "base.safetensors"
    )  # fmt: skip
    state = {name: value.clone() for name, value in created.model.state_dict().items()}
    factors = {}
    for name, value in state.items():
        if (".attn." in name and value.ndim == 2) or name == "pos_embed":
            a, b = torch.randn(4, value.shape[-1]) / 10, torch.randn(value[..., 0].numel(), 4) / 10
            factors[name] = Factors(a, b, 0.5)
            value += 0.5 * (b @ a).reshape(value.shape)
    card = Card(created.spec, created.input, ("a", "b", "c"))
    save_task(tmp_path / "pack", state=state, created=created, card=card, trained=list(factors), factors=factors)
    task = load_task(tmp_path / "pack", base=tmp_path / "base.safetensors")
    assert task.card.schema == 2
    assert task.carried >= factors.keys()
    for name, value in task.model.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=1e-6)
    assert {name: f.rank for name, f in read_pack(tmp_path / "pack").factors.items()} == dict.fromkeys(factors, 4)
