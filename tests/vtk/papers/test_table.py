"""One table for the models and transforms of the papers: trained, counted, saved, fused, packed, exported, profiled.

Each row is small and passes every check, or a part of the toolkit refuses it by name. A few rows are in the default
tests, all of them in the slow ones.
"""

import functools
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import vtk
from tests.vtk.papers._cases import BY_ID, CASES, Case
from vtk.card import Card
from vtk.errors import UsageError
from vtk.formats import save_tensors
from vtk.models.create import Created
from vtk.models.packed.forward import Segments, attention_modules, own_parameters, packed_forward
from vtk.packs.load import card_metadata, load_checkpoint
from vtk.profiling.config import ProfileConfig
from vtk.training.policies import policy
from vtk.training.policies.census import take_census
from vtk_export.graph.convert import choose_form, convert

QUICK = ("alternet-18-cifar", "vit-local-parallel-cb", "uniform-c", "se-cb", "mixer-cb", "parallel-hmlp-cb")


def rows(*quick: str) -> list:
    """Return all rows of the table, those that are not among the quick ones as slow tests."""
    return [pytest.param(c, id=c.id, marks=() if c.id in quick else pytest.mark.slow) for c in CASES]


@functools.cache
def made(name: str) -> Created:
    """Return a row's model, in eval mode; it is not changed."""
    return BY_ID[name].make()


def images(case: Case, count: int) -> torch.Tensor:
    return torch.randn(count, 3, case.size, case.size, generator=torch.Generator().manual_seed(count))


@torch.no_grad()
def logits(model: nn.Module, x: torch.Tensor) -> np.ndarray:
    return model.eval()(x).numpy()


def test_every_row_has_a_name_of_its_own_and_the_quick_ones_exist():
    assert len(BY_ID) == len(CASES) and set(QUICK) <= BY_ID.keys()


@pytest.mark.parametrize("case", rows(*QUICK))
def test_every_parameter_is_trained(case):
    model = case.make().model
    policy.apply(model, policy.select(model, "full"))
    policy.train_mode(model)
    loss = nn.functional.cross_entropy(model(images(case, 4)), torch.tensor([0, 1, 2, 0]))
    loss.backward()
    assert loss.isfinite()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0, name


@pytest.mark.parametrize("case", rows(*QUICK))
def test_every_parameter_is_in_the_group_that_it_is_in_by_hand(case):
    model = made(case.id).model
    by_hand = {name: case.group(name) for name, _ in model.named_parameters()}
    found = policy.group_names(model)
    assert not case.unused(model)
    assert {name: found[name] for name in by_hand} == by_hand
    if not case.attention:
        with pytest.raises(UsageError, match="has no attention weights"):
            policy.select(model, "attn")
        return
    chosen = policy.select(model, "attn")
    assert chosen == {n for n, g in by_hand.items() if g in ("attention", "head", "position", "context")}
    census = {row.group: row for row in take_census(model, chosen, "attn").rows}
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert {g: row.trained + row.frozen for g, row in census.items()} == {
        g: sum(sizes[n] for n in sizes if by_hand[n] == g) for g in set(by_hand.values())
    }
    assert census["attention"].frozen == 0


@pytest.mark.parametrize("case", rows(*QUICK))
def test_frozen_batch_norms_do_not_drift(case):
    model = case.make().model
    norms = {n for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}
    before = {k: v.clone() for k, v in model.state_dict().items()}
    free = policy.select(model, "attn" if case.attention else "head")
    policy.apply(model, free)
    policy.train_mode(model)
    model(images(case, 4)).sum().backward()
    changed = {k.rpartition(".")[0] for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {n for n in norms if f"{n}.weight" in free}


@pytest.mark.parametrize("case", rows(*QUICK))
def test_a_checkpoint_is_the_model_again(case, tmp_path):
    model = made(case.id).model
    again = load_checkpoint(save(case, tmp_path)).model
    assert {k: v.tolist() for k, v in again.state_dict().items()} == {
        k: v.tolist() for k, v in model.state_dict().items()
    }
    x = images(case, 2)
    np.testing.assert_array_equal(logits(again, x), logits(model, x))


@pytest.mark.parametrize("case", rows(*QUICK))
def test_the_fused_model_is_the_model_or_is_refused_by_name(case):
    model = made(case.id).model
    if case.fuse is not None:
        with pytest.raises(UsageError, match=case.fuse) as caught:
            vtk.fuse(model)
        assert "\n" not in str(caught.value) and "eager" in str(caught.value)
        assert choose_form(model, False) is model
        return
    x = images(case, 3).double()
    exact = case.make().model.double().eval()
    np.testing.assert_allclose(logits(vtk.fuse(exact), x), logits(exact, x), atol=1e-9, rtol=0)


@pytest.mark.parametrize("case", rows(*QUICK))
def test_a_packed_pass_is_the_model_or_is_refused_by_name(case):
    model = made(case.id).model
    if case.pack == "":
        return
    if case.pack is not None:
        with pytest.raises(UsageError, match=case.pack) as caught:
            attention_modules(model.blocks)
        assert "\n" not in str(caught.value) and "serve this model separately" in str(caught.value)
        return
    layers = [{n: p[None] for n, p in own_parameters(a).items()} for _, a in attention_modules(model.blocks)]
    torch.manual_seed(0)
    tokens = torch.randn(3, 7, model.embed_dim)
    with torch.no_grad():
        found = packed_forward(model.blocks, layers, Segments.of([(0, 3, 7)]), tokens.flatten(0, 1))
        torch.testing.assert_close(found, model.blocks(tokens).flatten(0, 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", rows())
def test_onnx_files_of_any_batch_are_the_model(case):
    created = case.make()
    graph = convert(created.model, created.input, opset=18)
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    for batch in (1, 2, 3):
        x = images(case, batch)
        expected = logits(created.model, x)
        (found,) = session.run(None, {"pixel_values": x.numpy()})
        np.testing.assert_allclose(found, expected, atol=1e-4 * max(1.0, np.abs(expected).max()), rtol=0)


@pytest.mark.parametrize("case", rows())
def test_a_profile_measures_it(case, tmp_path):
    file = save(case, tmp_path)
    config = ProfileConfig(batch_sizes=(2,), backends=("eager",), device="cpu", threads=1, duration=0.05)
    (backend,) = vtk.profile(file, config, show_progress=False).backends
    (cell,) = backend.cells
    assert (backend.status, cell.status) == ("measured", "ok")
    # calls take turns with images of other places than in the reference's batch: convolutions round by the place
    assert cell.max_diff <= 1e-6
    assert cell.runs >= 10 and cell.images_per_second > 0


def save(case: Case, folder: Path) -> Path:
    """Write the row's model as the checkpoint that `vtk tasks merge` and `vtk train` write."""
    created = made(case.id)
    card = Card(created.spec, created.input, ("a", "b", "c"), transforms=created.transforms)
    save_tensors(folder / "model.safetensors", created.model.state_dict(), card_metadata(card))
    return folder / "model.safetensors"
