"""What a bank refuses, by name and in one line, and that it serves on as before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vtk.bank import TaskBank
from vtk.card import Transform
from vtk.errors import BaseError, DataError, UsageError, VtkError
from vtk.packs import load_task


@pytest.fixture(scope="module")
def lab(make_lab: Any) -> Any:
    lab = make_lab()
    lab.pack("pets")
    return lab


@pytest.fixture
def bank(lab: Any) -> TaskBank:
    return lab.bank({"pets": lab.root / "pets"})


def one_line(error: pytest.ExceptionInfo[VtkError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


IMAGES: dict[str, tuple[Callable[[], Any], str]] = {
    "task": (lambda: {"cars": torch.zeros(1, 3, 32, 32)}, r"no task 'cars'.*holds pets"),
    "size": (lambda: {"pets": torch.zeros(1, 3, 48, 48)}, r"`pets` are \(1, 3, 48, 48\); it takes \(B, 3, 32, 32\)"),
    "channels": (lambda: {"pets": torch.zeros(1, 1, 32, 32)}, r"\(B, 3, 32, 32\)"),
    "no batch": (lambda: {"pets": torch.zeros(3, 32, 32)}, r"\(B, 3, 32, 32\)"),
    "none of another size": (lambda: {"pets": torch.zeros(0, 3, 16, 16)}, r"\(B, 3, 32, 32\)"),
    "type": (lambda: {"pets": torch.zeros(1, 3, 32, 32, dtype=torch.uint8)}, r"torch\.uint8; give normalised"),
    "no mapping": (lambda: torch.zeros(1, 3, 32, 32), "a mapping of task names"),
    "list": (lambda: {"pets": [[0.0]]}, "are a list; give a tensor"),
}


@pytest.mark.parametrize("case", IMAGES)
def test_images_that_do_not_fit(bank: TaskBank, case: str) -> None:
    make, message = IMAGES[case]
    with pytest.raises(UsageError, match=message) as error:
        bank(make())
    one_line(error)


CHANGED = [
    "blocks.1.mlp.fc1.weight", "blocks.0.norm1.weight", "norm.bias", "patch_embed.proj.weight",
]  # fmt: skip


@pytest.mark.parametrize("key", CHANGED)
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_a_pack_that_changed_what_is_shared(lab: Any, key: str, first: bool) -> None:
    bank = lab.bank({} if first else {"pets": lab.root / "pets"})
    pack = lab.pack(f"bad-{key}", change={key: lambda t: t + 0.1})
    with pytest.raises(UsageError, match=f"changed `{key}`, .*separate model") as error:
        bank.add("bad", pack)
    one_line(error)
    assert list(bank.tasks) == ([] if first else ["pets"])


def test_a_pack_of_another_base(lab: Any, bank: TaskBank) -> None:
    other = lab.base(change="blocks.0.mlp.fc1.bias")
    pack = lab.pack("other", weights=other)
    with pytest.raises(BaseError, match=r"blocks\.0\.mlp\.fc1\.bias` differs"):
        bank.add("other", pack)
    any_base = TaskBank(dtype=torch.float64)
    any_base.add("pets", lab.root / "pets")
    with pytest.raises(
        BaseError, match=r"is of base \w{12}, this bank of \w{12} \(`blocks\.0\.mlp\.fc1\.bias`"
    ) as error:
        any_base.add("other", pack)
    one_line(error)


def test_packs_of_other_transforms_and_other_trained_scales(lab: Any, bank: TaskBank) -> None:
    broad = (Transform("add_context_broadcast", {"scale": True}),)
    first = lab.pack("broad", transforms=broad, scales=1.0)
    with pytest.raises(UsageError, match=r"made with add_context_broadcast\(scale=True\), this bank's .* no transform"):
        bank.add("broad", first)
    mixed = lab.bank({"a": first})
    mixed.add("b", lab.pack("alike", transforms=broad, scales=1.0, seed=4))
    with pytest.raises(UsageError, match=r"changed `blocks\.0\.mlp\.cb\.scale`"):
        mixed.add("c", lab.pack("unlike", transforms=broad, scales=0.5))


def test_a_pack_that_holds_nan(lab: Any, bank: TaskBank) -> None:
    images = {"pets": torch.randn(1, 3, 32, 32)}
    before = bank(images)["pets"]
    pack = lab.pack("nan", change={"blocks.0.attn.qkv.weight": lambda t: t * float("nan")})
    with pytest.raises(DataError, match=r"`blocks\.0\.attn\.qkv\.weight` holds numbers that are not finite"):
        bank.add("nan", pack)
    damaged = load_task(lab.pack("later", classes=3), base=lab.weights)
    damaged.model.blocks[0].attn.qkv.weight.data[0] = float("nan")
    with pytest.raises(DataError, match=r"`blocks\.0\.attn\.qkv\.weight` holds NaN or infinity"):
        bank.add("nan", damaged)
    assert torch.equal(bank(images)["pets"], before)


def test_images_that_hold_nan_stay_alone(lab: Any) -> None:
    for kernels in (False, True):
        bank = lab.bank({"a": lab.root / "pets", "b": lab.root / "pets"}, kernels=kernels)
        good = torch.randn(2, 3, 32, 32)
        bad = torch.full_like(good, float("nan"))
        both = bank({"a": bad, "b": good})
        assert both["a"].isnan().all()
        torch.testing.assert_close(both["b"], bank({"b": good})["b"], rtol=1e-12, atol=1e-12)


def test_names_packs_and_options(lab: Any, bank: TaskBank) -> None:
    for name, pack, message in (
        ("pets", lab.root / "pets", "there is a task `pets`"),
        ("", lab.root / "pets", "name is ''"),
        ("x", lab.root / "absent", "there is no folder"),
        ("x", lab.weights, "is a file"),
    ):
        with pytest.raises(VtkError, match=message):
            bank.add(name, pack)
    for act in (bank.remove, bank.reload):
        with pytest.raises(UsageError, match="no task 'cars'"):
            act("cars")
    for options, message in (
        ({"device": "mps"}, "runs on cpu or cuda"), ({"dtype": torch.int8}, "torch.float16"),
        ({"max_gpu_bytes": 0}, "max_gpu_bytes"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            TaskBank(lab.weights, **options)


def test_other_architectures(make_lab: Any, bank: TaskBank, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = make_lab(depth=1)
    with pytest.raises(VtkError):
        bank.add("deep", deep.pack("deep"))
    import timm.models.vision_transformer as vit

    class Other(vit.VisionTransformer):
        def pool(self, x: Any, pool_type: Any = None) -> Any:
            return x[:, 1]

    from vtk.bank import loader as module

    def load(path: Any, **options: Any) -> Any:
        task = original(path, **options)
        task.model.__class__ = Other
        return task

    original = module.load_task
    monkeypatch.setattr(module, "load_task", load)
    with pytest.raises(UsageError, match="is a Other, whose `pool` is its own; serve it"):
        deep.bank({"other": deep.root / "deep"})
