"""``vtk.create_model``: a module like timm's own, and the facts beside it."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import vtk
from vtk.models.create import Created, build_model

NAME = "vit_tiny_patch16_224"
TINY: dict[str, Any] = {"depth": 2, "embed_dim": 48, "num_heads": 2}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(4)
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    save_file(timm.create_model(NAME, num_classes=4, img_size=32, **TINY).state_dict(), path)
    return path


@pytest.fixture
def model(weights: Path) -> Any:
    return vtk.create_model(NAME, num_classes=4, img_size=32, weights=weights, kwargs=TINY)


def test_what_is_returned_is_timms_module(model: Any, weights: Path) -> None:
    plain = timm.create_model(NAME, num_classes=4, img_size=32, **TINY)
    plain.load_state_dict(timm.models.load_state_dict(str(weights)))
    assert isinstance(model, type(plain)) and type(model).__name__ == "VisionTransformer"
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model.eval()(images), plain.eval()(images))


def test_facts_are_those_of_the_builder(model: Any, weights: Path) -> None:
    built = build_model(NAME, num_classes=4, img_size=32, weights=weights, kwargs=TINY)
    facts = model.created
    assert isinstance(facts, Created) and facts.model is model
    assert (facts.spec, facts.input, facts.key_map, facts.base.ref) == (
        built.spec, built.input, built.key_map, built.base.ref
    )  # fmt: skip


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_is_a_model_with_facts_of_its_own(model: Any, copied: Any) -> None:
    other = copied(model)
    assert type(other) is type(model) and other.created.model is other and model.created.model is model
    with torch.no_grad():
        other.head.bias.add_(1)
    images = torch.randn(2, 3, 32, 32)
    assert torch.allclose(other.eval()(images), model.eval()(images) + 1)
    assert other.created.base.ref == model.created.base.ref


def test_a_copy_shares_the_base(model: Any) -> None:
    other = copy.deepcopy(model)
    assert other.created.base is model.created.base
    assert other.created.key_map is not model.created.key_map


@pytest.mark.parametrize("name", [f for f in Created.__dataclass_fields__ if f != "model"])
def test_old_names_give_the_facts_with_a_warning(model: Any, name: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"model\.created\.{name}"):
        assert getattr(model, name) is getattr(model.created, name)


def test_the_old_name_of_the_model_is_the_model(model: Any) -> None:
    with pytest.warns(DeprecationWarning, match="the model itself"):
        assert model.model is model


def test_a_models_own_attributes_come_first(model: Any) -> None:
    model.base = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(model.base, nn.Linear)
        with pytest.raises(AttributeError, match="nothing"):
            _ = model.nothing


def test_the_model_fuses_trains_and_compiles_nothing_extra(model: Any) -> None:
    images = torch.randn(2, 3, 32, 32)
    fused = vtk.fuse(copy.deepcopy(model).eval())
    with torch.no_grad():
        torch.testing.assert_close(fused(images), model.eval()(images), rtol=1e-4, atol=1e-5)
    model.train()(images).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
