"""What a function is given that is of another type: one line that says what it takes, whatever the function."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import vtk
from vtk.errors import UsageError

ONLY_OPTIONS = ("finetune", "finetune_tasks", "train", "pretrain", "profile_server")
WITH_A_SOURCE = (
    "predict", "profile", "profile_sizes", "analyze", "audit", "parallelize", "export_onnx", "export_openvino",
    "export_aoti", "export_tensorrt", "export_tasks", "export_triton",
)  # fmt: skip


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


@pytest.mark.parametrize("name", [*ONLY_OPTIONS, *WITH_A_SOURCE])
@pytest.mark.parametrize("given", ["out", 3, {"out": "x"}, vtk.EvalConfig(data=Path("d")), vtk.TrainConfig], ids=repr)
def test_what_is_no_config_is_refused_by_name(name: str, given: Any) -> None:
    call: Callable[..., Any] = getattr(vtk, name)
    with pytest.raises(UsageError, match=f"`vtk.{name}` takes its options as a vtk.\\w+Config, found ") as caught:
        call(given) if name in ONLY_OPTIONS else call("source", given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["vit_tiny_patch16_224", small()], ids=["name", "module"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("img_size", v) for v in ("abc", "32", 0, -1, 1.5, (32,), (1, 2, 3), True, {})),
        *(("classes", v) for v in ("abc", b"abc", 3)),
        *(("num_classes", v) for v in (0, 1.5, "3", True)),
        ("pretrained", "no"),
        ("base", 3),
    ],
    ids=repr,
)  # fmt: skip
def test_how_to_open_is_checked_like_an_option(source: Any, name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"`(--)?{name.replace('_', '.')}` is .*(allowed is|give)"):
        vtk.open_source(source, **{name: value})


def test_numbers_and_names_of_numpy_serve() -> None:
    source = vtk.open_source(small(), img_size=np.int64(32), classes=np.array(["a", "b", "c"]))  # type: ignore[arg-type]
    assert source.card.classes == ("a", "b", "c") and source.card.input.size == (32, 32)
    named = vtk.open_source("vit_tiny_patch16_224", pretrained=False, classes=np.array(["a", "b"]))  # type: ignore[arg-type]
    assert named.card.classes == ("a", "b")


@pytest.mark.parametrize("given", [3, None, small(), ""], ids=["number", "none", "module", "empty"])
def test_what_is_no_path_is_refused(given: Any, tmp_path: Path) -> None:
    for call in (
        lambda: vtk.load_task(given),
        lambda: vtk.load_checkpoint(given),
        lambda: vtk.TaskBank().add("a", given),
        lambda: vtk.merge_task(given, tmp_path / "m.safetensors"),
    ):
        with pytest.raises(UsageError, match="takes the path of a pack or checkpoint, and was given a"):
            call()


@pytest.mark.parametrize("packs", ["runs/a", 3, {"a": small(), "b": small()}, [3, 4]], ids=["text", "n", "m", "l"])
def test_what_is_no_list_of_packs_is_refused(packs: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="packs are given as a list of paths, or a mapping of names to paths"):
        vtk.export_tasks(packs, vtk.TasksConfig(out=tmp_path / "o"))


@pytest.mark.parametrize("given", ["runs/a", Path("runs/a"), 3, None], ids=repr)
def test_only_a_module_is_fused(given: Any) -> None:
    with pytest.raises(UsageError, match="`fuse` takes a timm Vision Transformer as a module, and was given"):
        vtk.fuse(given)


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("img_size", v) for v in ("160", 1.5, (160,), True)), *(("num_classes", v) for v in (-1, "3", True, 1.5))],
    ids=repr,
)
def test_create_model_checks_its_numbers(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"num_classes": 3, "pretrained": False, name: value}
    with pytest.raises(UsageError, match=f"`{name}` is "):
        vtk.create_model("test_vit", **arguments)


def test_create_model_takes_sizes_of_numpy() -> None:
    model: Any = vtk.create_model("test_vit", num_classes=3, pretrained=False, img_size=np.int64(64))  # type: ignore[arg-type]
    assert model.patch_embed.img_size == (64, 64)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(images.flatten(1))  # type: ignore[no-any-return]


def test_modules_that_could_not_be_run_later_are_refused_at_once() -> None:
    with pytest.raises(UsageError, match="Lazy has weights without a shape yet"):
        vtk.open_source(Lazy(), img_size=32)
    script = torch.jit.trace(small(), torch.zeros(2, 3, 32, 32))
    with pytest.raises(UsageError, match="is a module of TorchScript"):
        vtk.open_source(script, img_size=32)
    with pytest.raises(UsageError, match="`--img-size` is 1000000000; allowed is from 1 to 16384"):
        vtk.open_source(small(), img_size=10**9)
