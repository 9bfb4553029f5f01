"""Packs of one tiny base, and exports of them; torch's exporter takes seconds, so each structure is converted once."""

import contextlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import timm
import torch
from onnx import numpy_helper
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vtk.__main__ import main
from vtk.card import Card, Transform
from vtk.models.create import build_model
from vtk.packs.pack import save_task
from vtk_export.graph.convert import convert
from vtk_export.tasks.gathered_vit import GatheredViT

NAME = "vit_tiny_patch16_224"
KWARGS: dict[str, Any] = {"depth": 1, "embed_dim": 32, "num_heads": 2}
CB = Transform("add_context_broadcast", {})
PARALLEL = Transform("parallelize", {"branches": 2})

_made: dict[str, tuple[bytes, dict[str, Tensor]]] = {}


def convert_once(model: nn.Module, *args: Any, **kwargs: Any) -> onnx.ModelProto:
    """Convert, or take what a model of the same structure was converted to and put this one's weights in."""
    structure = re.sub(r"\(head\): .*", "", str(model))  # a template serves any number of classes
    if isinstance(model, GatheredViT):
        structure += str({k: v.double().sum().item() for k, v in model.state_dict().items()})
    key = f"{structure} {args} {kwargs}"
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    if key not in _made:
        _made[key] = convert(model, *args, **kwargs).SerializeToString(), state
    data, start = _made[key]
    proto = onnx.ModelProto.FromString(data)
    if any(not torch.equal(start[k], state[k]) for k in state):
        _put(proto, start, state)
    return proto


def _put(proto: onnx.ModelProto, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Replace every initialiser that is a tensor of ``old``, as it is or transposed, by that of ``new``."""
    found: dict[bytes, Tensor] = {}
    for key, value in old.items():
        if value.ndim == 2:
            found[value.t().contiguous().numpy().tobytes()] = new[key].t()
        found[value.contiguous().numpy().tobytes()] = new[key]
    for tensor in proto.graph.initializer:
        if (value := found.get(tensor.raw_data)) is not None:
            tensor.CopyFrom(numpy_helper.from_array(value.contiguous().numpy(), tensor.name))
            if tensor.name.startswith("head"):
                classes = len(value)
    proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value = classes
    proto.graph.ClearField("value_info")


@pytest.fixture(scope="session", autouse=True)
def _convert_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vtk_export.tasks.build.convert", convert_once)
        patch.setattr("vtk_export.tasks.factor_build.convert", convert_once)
        yield


class Lab:
    """A folder with a base and packs trained on it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def base(self, name: str = "base", seed: int = 1, **kwargs: Any) -> Path:
        path = self.root / f"{name}.safetensors"
        if not path.exists():
            torch.manual_seed(seed)
            state = timm.create_model(NAME, img_size=32, num_classes=2, **{**KWARGS, **kwargs}).state_dict()
            save_file({k: v + 0.1 * torch.randn_like(v) for k, v in state.items()}, path)
        return path

    def pack(
        self,
        name: str,
        classes: int,
        *,
        size: int | tuple[int, int] = 32,
        base: Path | None = None,
        transforms: tuple[Transform, ...] = (),
        train: Callable[[str], bool] = lambda key: ".attn." in key,
        seed: int = 0,
        **kwargs: Any,
    ) -> Path:
        """Write a run folder whose trained tensors are far from the base's."""
        created = build_model(
            NAME, num_classes=classes, img_size=size, weights=base or self.base(), kwargs={**KWARGS, **kwargs},
            transforms=transforms, seed=seed,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(seed + classes)
        state = {k: v.clone() for k, v in created.model.state_dict().items()}
        trained = [k for k in state if train(k) or k == "pos_embed" or k.startswith("head.")]
        for key in trained:
            state[key] += 0.3 * torch.randn(state[key].shape, generator=generator)
        card = Card(created.spec, created.input, tuple(f"{name}{i}" for i in range(classes)))
        save_task(self.root / name / "task", state=state, created=created, card=card, trained=trained)
        return self.root / name

    def timm(self, name: str, classes: int, size: int | tuple[int, int] = 32) -> nn.Module:
        """The plain timm model, built from the files of base and pack alone."""
        model = timm.create_model(NAME, num_classes=classes, img_size=size, **KWARGS)
        state = load_file(self.base()) | load_file(self.root / name / "task" / "task.safetensors")
        model.load_state_dict(state, strict=True)
        return model.eval()


@dataclass
class Export:
    """What ``vtk export tasks … --json`` left."""

    out: Path
    result: dict[str, Any]
    stderr: str

    @property
    def index(self) -> dict[str, Any]:
        return json.loads((self.out / "tasks.json").read_text(encoding="utf-8"))

    def external(self, file: str) -> dict[str, tuple[str, int, int]]:
        """Initialiser to (file, offset, bytes), of those outside the graph."""
        found = {}
        for tensor in onnx.load(self.out / file, load_external_data=False).graph.initializer:
            entries = {e.key: e.value for e in tensor.external_data}
            if entries:
                found[tensor.name] = (entries["location"], int(entries["offset"]), int(entries["length"]))
        return found


def export(*argv: object) -> Export:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["export", "tasks", *map(str, argv), "--json"])
    assert code == 0, err.getvalue()
    return Export(Path(str(argv[argv.index("--out") + 1])), json.loads(out.getvalue()), err.getvalue())


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="session")
def packs(lab: Lab) -> dict[str, Path]:
    """Tasks of different class counts; ``cb`` has Context Broadcasting, ``wide`` images of another size."""
    return {
        "pets": lab.pack("pets", 3),
        "cars": lab.pack("cars", 5),
        "cb": lab.pack("cb", 4, transforms=(CB,)),
        "wide": lab.pack("wide", 2, size=(32, 48)),
    }


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A class folder of each class of `pets`, with photographs."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for i in range(3):
        (root / f"pets{i}").mkdir()
        for k in range(2):
            Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(root / f"pets{i}" / f"{k}.png")
    return root


@pytest.fixture(scope="session")
def both(packs: dict[str, Path], photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Two tasks in both forms, verified on photographs."""
    out = tmp_path_factory.mktemp("both") / "out"
    return export(packs["pets"], packs["cars"], "--form", "both", "--out", out, "--data", photos)


@pytest.fixture(scope="session")
def files(packs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Three tasks as files: one with Context Broadcasting, one of another image size."""
    out = tmp_path_factory.mktemp("files") / "out"
    return export(packs["pets"], packs["cb"], f"wide={packs['wide'] / 'task'}", "--out", out)


@pytest.fixture(scope="session")
def tools() -> Any:
    """What tests share: they cannot import from one another."""

    class Tools:
        run_export = staticmethod(export)
        transforms: Mapping[str, Transform] = {"cb": CB, "parallel": PARALLEL}
        convert = staticmethod(convert_once)

        @staticmethod
        def images(count: int, size: tuple[int, int] = (32, 32), seed: int = 0) -> Tensor:
            return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed))

    return Tools
