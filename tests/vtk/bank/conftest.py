"""Packs of small Vision Transformers whose trained tensors are far from the base's."""

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vtk.bank import TaskBank
from vtk.card import Card, Transform
from vtk.models.create import build_model
from vtk.models.weights.files import SIZE
from vtk.packs import Task, load_task, save_task
from vtk.packs.factors import Factors
from vtk.packs.load import build_from_card
from vtk_kernels.support import interpreting

NAME = "vit_tiny_patch16_224"
KWARGS: dict[str, Any] = {"depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 8}
CB = Transform("add_context_broadcast", {})


_loaded: dict[tuple[Path, int, Any], Task] = {}


_exact: dict[tuple[Path, int], nn.Module] = {}


def load_once(path: Path, *, base: Any = None) -> Task:
    """Load a pack, or copy it if it was loaded: building a model takes longer than all that is tested here."""
    key = (path, (path / "task.json").stat().st_mtime_ns if path.is_dir() else 0, base)
    if key not in _loaded:
        _loaded[key] = load_task(path, base=base)
    return dataclasses.replace(_loaded[key], model=copy.deepcopy(_loaded[key].model))


@pytest.fixture(autouse=True)
def _load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vtk.bank.loader.load_task", load_once)


class Lab:
    """A base, and packs made from it."""

    def __init__(
        self, root: Path, kwargs: Mapping[str, Any], transforms: tuple[Transform, ...], model: str = NAME
    ) -> None:
        self.root, self.kwargs, self.transforms, self.model = root, dict(kwargs), transforms, model
        self.weights = self.base()

    def base(self, seed: int = 1, change: str | None = None) -> Path:
        """Write base weights; ``change`` names a tensor to be different."""
        torch.manual_seed(seed)
        state = timm.create_model(
            self.model, **({} if "naflex" in self.model else {"img_size": 32}), **self.kwargs
        ).state_dict()
        generator = torch.Generator().manual_seed(seed)
        for key, value in state.items():
            if value.is_floating_point():
                state[key] = value + 0.1 * torch.randn(value.shape, generator=generator)
        if change is not None:
            state[change] = state[change] + 1
        path = self.root / f"base{seed}{change or ''}.safetensors"
        save_file(state, path, {} if self.model == NAME else {SIZE: "32x32"})
        return path

    def pack(
        self,
        name: str,
        *,
        classes: int = 3,
        size: int | tuple[int, int] = 32,
        train: str = "attn",
        seed: int = 0,
        change: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        weights: Path | None = None,
        transforms: tuple[Transform, ...] | None = None,
        scales: float = 0.0,
        dtype: Any = "fp32",
        **options: Any,
    ) -> Path:
        """Write a pack: the tensors of its policy moved, and what ``change`` says on top."""
        created = build_model(
            self.model, num_classes=classes, img_size=size, weights=weights or self.weights,
            kwargs=self.kwargs, transforms=self.transforms if transforms is None else transforms, seed=seed + 7,
            **options,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        state = {k: v.clone() for k, v in created.model.state_dict().items()}
        mine = {k for k in state if k.startswith(("head.", "head_dist.")) or "pos_embed" in k}
        if train == "attn":
            also = ("attn_pool.", "rope.", "rel_pos_bias.", "shared_rel_pos.")
            mine |= {k for k in state if (".attn." in k and not k.endswith("cb.scale")) or k.startswith(also)}
        elif train == "full":
            mine = set(state)
        for key in sorted(mine):
            state[key] += 0.2 * torch.randn(state[key].shape, generator=generator)
        for key in (k for k in state if k.endswith((".cb.scale", ".cb_msa.scale"))):
            state[key] += scales * torch.linspace(-1, 1, len(state[key]))
        for key, function in (change or {}).items():
            state[key] = function(state[key])
        mine |= set(change or {}) | {k for k, v in created.key_map.items() if v is None}
        card = Card(created.spec, created.input, tuple(f"{name}{i}" for i in range(classes)))
        save_task(self.root / name, state=state, created=created, card=card, trained=mine, dtype=dtype)
        return self.root / name

    def factors(
        self,
        name: str,
        *,
        ranks: Sequence[int] = (2, 1, 3),
        classes: int = 3,
        size: int | tuple[int, int] = 32,
        seed: int = 0,
        dtype: Any = "fp32",
        whole: Collection[str] = (),
        parts: Collection[str] = (),
        **options: Any,
    ) -> Path:
        """Write a pack whose attention matrices and position table are changes of these ranks in turn.

        Matrices whose names have one of ``whole`` in them are stored whole; of small tensors of attention only those
        with one of ``parts``, by default all.
        """
        created = build_model(
            self.model, num_classes=classes, img_size=size, weights=self.weights, kwargs=self.kwargs,
            transforms=self.transforms, seed=seed + 7, **options,
        )  # fmt: skip
        g, state = torch.Generator().manual_seed(seed), created.model.state_dict()
        found, trained = dict[str, Factors](), set(created.initial)
        for key, value in state.items():
            matrix = value.ndim == 2 and ".attn." in key and key.endswith(".weight") and "rel" not in key
            if matrix or (key == "pos_embed" and created.key_map[key] is not None):
                trained.add(key)
                if not any(part in key for part in whole):
                    rows, columns = value[..., 0].numel(), value.shape[-1]
                    rank = min(ranks[len(found) % len(ranks)], rows, columns)
                    a, b = torch.randn(rank, columns, generator=g), torch.randn(rows, rank, generator=g)
                    found[key] = Factors(0.3 * a, 0.3 * b, 0.7)
                    continue
            small = ".attn." in key and not key.endswith("cb.scale") and any(p in key for p in parts or ("",))
            if key in trained - {k for k, v in created.key_map.items() if v is None and "head" not in k} or small:
                trained.add(key)
                state[key] = value + 0.2 * torch.randn(value.shape, generator=g)
        card = Card(created.spec, created.input, tuple(f"{name}{i}" for i in range(classes)))
        save_task(
            self.root / name, state=state, created=created, card=card, trained=trained, dtype=dtype, factors=found
        )
        return self.root / name

    def bank(self, packs: Mapping[str, Path], **options: Any) -> TaskBank:
        """Hold packs in fp64."""
        bank = TaskBank(self.weights, **{"dtype": torch.float64, **options})
        for name, path in packs.items():
            bank.add(name, path)
        return bank

    def alone(self, pack: Path) -> nn.Module:
        """The single-task model in fp64, to which changes are added in fp64, too."""
        task = load_once(pack, base=self.weights)
        key = (pack, (pack / "task.safetensors").stat().st_mtime_ns)
        if task.factors and key in _exact:
            return copy.deepcopy(_exact[key])
        model = task.model.double()
        if task.factors:
            with torch.no_grad():
                base = build_from_card(task.card, base=dataclasses.replace(task.base, transforms=())).model.state_dict()
                for name, f in task.factors.items():
                    value = base[name].double()
                    if f.rank:
                        a, b = f.a.double(), f.b.double()
                        if f.a_scale is not None:
                            a, b = a * f.a_scale.double()[:, None], b * f.b_scale.double()
                        value = value + f.scale * torch.einsum("rk,fr->fk", a, b).reshape(value.shape)
                    model.state_dict()[name].copy_(value)
            _exact[key] = copy.deepcopy(model)
        return model


MakeLab = Callable[..., Lab]


@pytest.fixture(scope="session")
def make_lab(tmp_path_factory: pytest.TempPathFactory) -> MakeLab:
    """Return a factory of labs: timm's arguments, transforms, and the model they are of."""

    def make(transforms: tuple[Transform, ...] = (), model: str = NAME, **kwargs: Any) -> Lab:
        return Lab(tmp_path_factory.mktemp("lab"), {**KWARGS, **kwargs}, transforms, model)

    return make


@pytest.fixture(scope="session")
def five(make_lab: MakeLab) -> tuple[Lab, dict[str, Path]]:
    """A lab with Context Broadcasting and five packs of three image sizes; ``cars`` trained its head only."""
    lab = make_lab((CB,))
    return lab, {
        "pets": lab.pack("pets", classes=3, size=32, seed=1),
        "cars": lab.pack("cars", classes=7, size=48, seed=2, train="head"),
        "food": lab.pack("food", classes=2, size=(32, 56), seed=3),
        "dogs": lab.pack("dogs", classes=4, size=48, seed=4),
        "cats": lab.pack("cats", classes=5, size=32, seed=5),
    }


def batch(bank: TaskBank, counts: Mapping[str, int], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, count in counts.items():
        info = bank.tasks[name]
        shape = (count, info.in_chans, info.height, info.width)
        found[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
    return found


def worst(bank: TaskBank, images: Mapping[str, Tensor], models: Mapping[str, nn.Module]) -> float:
    """Return the largest relative difference from single-task models."""
    logits, largest = bank(images), 0.0
    assert list(logits) == list(images)
    for name, found in logits.items():
        with torch.no_grad():
            wanted = models[name](images[name])
        assert found.shape == wanted.shape
        if len(found):
            largest = max(largest, float((found - wanted).abs().max() / wanted.abs().max()))
    return largest


@pytest.fixture
def tools() -> Any:
    """What tests share: they cannot import from one another."""

    class Tools:
        CB = CB
        interpreting = interpreting()
        random_batch = staticmethod(batch)
        worst_error = staticmethod(worst)

    return Tools
