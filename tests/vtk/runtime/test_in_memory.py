"""Sources in memory, against the modules that they were made of."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

import vtk
from vtk.card import Card
from vtk.errors import UsageError
from vtk.models.create import build_model
from vtk.packs.load import Task, load_checkpoint, load_task
from vtk.packs.merge import merge_task
from vtk.packs.pack import save_task
from vtk.profiling.config import ProfileConfig
from vtk.profiling.profile import run
from vtk.runtime.backends.base import load_backend
from vtk.runtime.opening import open_source
from vtk.runtime.source import Source

TINY: dict[str, Any] = {"depth": 2, "embed_dim": 48, "num_heads": 2}


def sequential() -> nn.Module:
    """Two channels, no fact about itself."""
    return nn.Sequential(nn.Conv2d(2, 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(),
                         nn.Linear(8 * 6 * 4, 5))  # fmt: skip


def vit(**more: Any) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", num_classes=4, **{"img_size": 32, **TINY, **more})


@pytest.fixture
def task(tmp_path: Path) -> Task:
    torch.manual_seed(3)
    save_file(vit().state_dict(), tmp_path / "base.safetensors")
    created = build_model("vit_tiny_patch16_224", num_classes=4, img_size=32, kwargs=TINY,
                          weights=tmp_path / "base.safetensors")  # fmt: skip
    card = Card(created.spec, created.input, ("a", "b", "c", "d"))
    save_task(
        tmp_path / "run" / "task", state=created.model.state_dict(), created=created, card=card, trained=["head.bias"]
    )
    return load_task(tmp_path / "run" / "task", base=tmp_path / "base.safetensors")


def same(source: Source, module: nn.Module, images: Tensor) -> None:
    want = copy.deepcopy(module).float().eval()
    with torch.no_grad():
        assert torch.equal(source.model()(images), want(images))


def test_plain_module_with_a_size() -> None:
    module = sequential()
    source = open_source(module, img_size=(24, 16))
    assert (source.kind, source.name, source.path, source.described) == ("module", "Sequential", None, False)
    assert (source.card.input.in_chans, source.card.input.size) == (2, (24, 16))
    assert source.card.classes == ("0", "1", "2", "3", "4")
    assert "mean 0.5" in source.notes[0]
    same(source, module, torch.randn(3, 2, 24, 16))


def test_timm_module_says_its_own_input() -> None:
    module = vit(img_size=(32, 48))
    module.pretrained_cfg = {**module.pretrained_cfg, "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "crop_pct": 0.9}
    source = open_source(module, classes=["w", "x", "y", "z"])
    spec = source.card.input
    assert (spec.size, spec.mean, spec.std, spec.crop_pct) == ((32, 48), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 0.9)
    assert (source.card.classes, source.described, source.notes) == (("w", "x", "y", "z"), True, ())
    same(source, module, torch.randn(2, 3, 32, 48))


def test_size_of_the_weights_where_the_module_takes_any() -> None:
    spec = open_source(timm.create_model("test_resnet", num_classes=3)).card.input
    assert spec.size == timm.get_pretrained_cfg("test_resnet").input_size[1:]


def test_older_timm_attribute_is_read() -> None:
    module = sequential()
    module.default_cfg = {"input_size": (2, 24, 16), "mean": (0.2, 0.3), "std": (0.5, 0.6)}  # type: ignore[assignment]
    spec = open_source(module).card.input
    assert (spec.size, spec.in_chans, spec.mean) == ((24, 16), 2, (0.2, 0.3))


def test_first_convolution_behind_a_rearrangement() -> None:
    module = nn.Sequential(nn.PixelUnshuffle(4), nn.Conv2d(48, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert open_source(module, img_size=16).card.input.in_chans == 3


def test_a_created_models_facts_are_taken(tmp_path: Path) -> None:
    module = vtk.create_model(
        "vit_tiny_patch16_224", num_classes=4, img_size=32, in_chans=2, pretrained=False, kwargs=TINY
    )
    card = open_source(module).card
    assert (card.model, card.transforms, card.input) == (
        module.created.spec, module.created.transforms, module.created.input
    )  # fmt: skip


def test_the_callers_module_is_not_changed() -> None:
    module = sequential().double().train()
    module[1].eval()
    calls: list[int] = []
    handle = module[0].register_forward_hook(lambda *_: calls.append(1))
    module(torch.randn(2, 2, 24, 16).double()).sum().backward()
    module[0].requires_grad_(False)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    grads = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    modes = [m.training for m in module.modules()]
    needs = [p.requires_grad for p in module.parameters()]
    state = torch.get_rng_state()
    source = open_source(module, img_size=(24, 16))
    model = source.model()
    model(torch.randn(1, 2, 24, 16))
    with torch.no_grad():
        model[0].weight.zero_()
    assert {p.dtype for p in model.parameters()} == {torch.float32} and not model.training and not model[3].training
    assert all(torch.equal(v, before[k]) and v.dtype == before[k].dtype for k, v in module.state_dict().items())
    assert all(
        p.grad is None if g is None else torch.equal(p.grad, g) for p, g in zip(module.parameters(), grads, strict=True)
    )
    assert ([m.training for m in module.modules()], [p.requires_grad for p in module.parameters()]) == (modes, needs)
    assert len(module[0]._forward_hooks) == 1 and handle.id in module[0]._forward_hooks
    assert not torch.equal(state, torch.get_rng_state()), "only the two draws above may have moved it"


def test_opening_draws_no_random_numbers() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 2), AlwaysRandom())
    state = torch.get_rng_state()
    open_source(module, img_size=2)
    assert torch.equal(state, torch.get_rng_state())


class AlwaysRandom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def test_tied_weights_stay_tied() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 12), nn.Linear(12, 12))
    module[2].weight = module[1].weight
    model = open_source(module, img_size=2).model()
    assert model[2].weight is model[1].weight and model[1].weight is not module[1].weight


def test_the_source_follows_the_module() -> None:
    module = sequential()
    source = open_source(module, img_size=(24, 16))
    with torch.no_grad():
        module[5].bias.fill_(7)
    assert torch.equal(source.model()[5].bias, torch.full((5,), 7.0))


def test_compiled_and_parallel_wrappers_are_taken_off() -> None:
    module = sequential()
    assert open_source(nn.DataParallel(module), img_size=(24, 16)).name == "Sequential"
    assert open_source(torch.compile(module), img_size=(24, 16)).name == "Sequential"


class Pair(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, x


@pytest.mark.parametrize(
    ("module", "options", "says"),
    [
        (sequential(), {}, "img_size="),
        (sequential(), {"img_size": (50, 16)}, "give its own img_size"),
        (sequential(), {"img_size": 0}, "`--img-size` is 0; allowed is from 1 to 16384"),
        (nn.Sequential(Pair()), {"img_size": 8}, "gives a tuple"),
        (nn.Sequential(nn.Conv2d(3, 4, 1)), {"img_size": 8}, "not logits"),
        (sequential().to("meta"), {"img_size": (24, 16)}, "meta device"),
        (sequential(), {"img_size": (24, 16), "classes": ["a"]}, "1 names"),
        (sequential(), {"img_size": (24, 16), "classes": ["a"] * 5}, "twice"),
        (sequential(), {"img_size": (24, 16), "num_classes": 5}, "`num_classes`"),
        (sequential(), {"img_size": (24, 16), "base": "x"}, "`base`"),
        (sequential(), {"img_size": (24, 16), "pretrained": False}, "`pretrained`"),
        (7, {}, "an int in memory cannot be opened"),
    ],
)  # fmt: skip
def test_what_cannot_be_opened_is_one_line(module: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_source(module, **options)
    assert says.replace("an int", "a int") in str(caught.value) and "\n" not in str(caught.value)


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    module = sequential()
    module.kept = module[5](torch.randn(2, 192))  # type: ignore[assignment]
    with pytest.raises(UsageError, match="cannot be copied"):
        open_source(module, img_size=(24, 16))


def test_a_source_is_returned_as_it_is() -> None:
    source = open_source(sequential(), img_size=(24, 16))
    assert open_source(source) is source
    with pytest.raises(UsageError, match="`img_size`"):
        open_source(source, img_size=8)


def test_a_task_in_memory_runs_as_it_is_now(task: Task, tmp_path: Path) -> None:
    source = open_source(task)
    assert (source.kind, source.name, source.path, source.card) == ("pack", "run", task.path, task.card)
    with torch.no_grad():
        task.model.head.bias.add_(3)  # type: ignore[union-attr]
    same(source, task.model, torch.randn(2, 3, 32, 32))
    assert source.model() is not task.model
    with pytest.raises(UsageError, match="`img_size`"):
        open_source(task, img_size=64)


def test_a_checkpoint_in_memory(task: Task, tmp_path: Path) -> None:
    merge_task(task.path, tmp_path / "merged.safetensors", base=tmp_path / "base.safetensors")
    source = open_source(load_checkpoint(tmp_path / "merged.safetensors"))
    assert (source.kind, source.name) == ("checkpoint", "merged")
    same(source, task.model, torch.randn(2, 3, 32, 32))


def test_a_bank_holds_a_task_from_memory(task: Task) -> None:
    with torch.no_grad():
        task.model.head.bias.add_(3)  # type: ignore[union-attr]
    images = torch.randn(2, 3, 32, 32)
    backend = load_backend("bank", open_source(task))
    try:
        got = backend.run({"pixel_values": images})["logits"]
    finally:
        backend.close()
    with torch.no_grad():
        torch.testing.assert_close(got, task.model(images), rtol=1e-4, atol=1e-5)
    assert task.model(images).shape == (2, 4), "the caller's model is used up"


def test_a_bank_refuses_a_module() -> None:
    with pytest.raises(UsageError, match="not the module VisionTransformer"):
        load_backend("bank", open_source(vit()))


def test_profile_of_a_module_in_every_torch_back_end() -> None:
    config = ProfileConfig(
        batch_sizes=(1, 2), duration=0.01, backends=("eager", "fused"), device="cpu", stability=100.0
    )
    result = run(config, open_source(vit()), load_backend, show_progress=False)
    assert result.source == "VisionTransformer" and result.kind == "module"
    assert [(b.name, c.batch, c.status) for b in result.backends for c in b.cells] == [
        (name, batch, "ok") for name in ("eager", "fused") for batch in (1, 2)
    ]


def test_profile_of_a_model_that_is_not_timms() -> None:
    module = torchvision.models.resnet18(num_classes=6)
    config = ProfileConfig(batch_sizes=(2,), duration=0.01, backends=("eager",), device="cpu", stability=100.0)
    result = run(config, open_source(module, img_size=64), load_backend, show_progress=False)
    assert [(b.name, c.status) for b in result.backends for c in b.cells] == [("eager", "ok")]
    assert result.input_shape == (3, 64, 64)


def test_class_names_of_a_timm_name() -> None:
    source = open_source("test_vit", pretrained=False, img_size=32, classes=("cat", "dog"))
    assert source.card.classes == ("cat", "dog") and source.described
    assert source.model()(torch.zeros(1, 3, 32, 32)).shape == (1, 2)
    with pytest.raises(UsageError, match="`classes`"):
        open_source("test_vit", pretrained=False, num_classes=3, classes=("cat", "dog"))
