"""The back-end ``bank`` against the pack's own model."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from vtk.card import Card
from vtk.errors import UnavailableError, UsageError
from vtk.models.create import build_model
from vtk.packs.pack import save_task
from vtk.runtime.backends.base import load_backend, predictor
from vtk.runtime.opening import open_source

TIMM = {"depth": 2, "embed_dim": 32, "num_heads": 2}


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two packs of one base, of three and of five classes."""
    root = tmp_path_factory.mktemp("packs")
    torch.manual_seed(0)
    plain = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, **TIMM)
    save_file(plain.state_dict(), root / "base.safetensors")
    found = []
    for number, classes in enumerate(("abc", "abcde")):
        created = build_model(
            "vit_tiny_patch16_224", num_classes=len(classes), img_size=32, weights=root / "base.safetensors",
            kwargs=TIMM,
        )  # fmt: skip
        state = {k: v.clone() for k, v in created.model.state_dict().items()}
        trained = [k for k in state if ".attn." in k or k.startswith("head.")]
        for name in trained:
            state[name] += 0.1 * torch.randn_like(state[name])
        path = root / f"task{number}"
        card = Card(created.spec, created.input, tuple(classes))
        save_task(path, state=state, created=created, card=card, trained=trained)
        found.append(path)
    return found


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("others", [(), (1,)], ids=["alone", "beside another"])
def test_logits_are_those_of_the_packs_model(packs: list[Path], images: torch.Tensor, others: tuple[int, ...]) -> None:
    source = open_source(packs[0])
    with torch.no_grad():
        expected = source.model()(images)
    options = {"tasks": tuple(str(packs[i]) for i in others)} if others else {}
    backend = load_backend("bank", source, threads=1, **options)
    torch.testing.assert_close(predictor(backend)(images), expected, rtol=0, atol=1e-5)
    assert backend.provider == ("bank of 2 tasks, cpu" if others else "bank of 1 task, cpu")
    assert backend.load_s > 0 and backend.batch is None
    backend.close()


def test_the_same_pack_may_be_held_twice(packs: list[Path]) -> None:
    backend = load_backend("bank", open_source(packs[0]), tasks=(str(packs[0]), str(packs[0])))
    assert backend.provider == "bank of 3 tasks, cpu"
    backend.close()


def test_threads_are_put_back(packs: list[Path]) -> None:
    torch.set_num_threads(1)
    backend = load_backend("bank", open_source(packs[0]), threads=2)
    assert torch.get_num_threads() == 2
    backend.close()
    assert torch.get_num_threads() == 1
    with pytest.raises(UsageError):
        load_backend("bank", open_source(packs[0]), threads=2, tasks=("no such folder\0",), more=1)
    assert torch.get_num_threads() == 1


def test_other_sources_and_options_are_refused(packs: list[Path]) -> None:
    with pytest.raises(UsageError, match="holds task packs, not the timm"):
        load_backend("bank", open_source("test_vit", pretrained=False))
    with pytest.raises(UsageError, match="no option `mode`"):
        load_backend("bank", open_source(packs[0]), mode="x")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_graphs_need_cuda(packs: list[Path]) -> None:
    with pytest.raises(UnavailableError, match="torch sees no CUDA device here; use bank"):
        load_backend("bank+graph", open_source(packs[0]))


def test_graphs_are_asked_of_the_bank(packs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with a card, which is not here: what is refused, and what the bank is told."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    source, cuda = open_source(packs[0]), torch.device("cuda", 0)
    with pytest.raises(UnavailableError, match="on cpu use bank"):
        load_backend("bank+graph", source, device="cpu")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UsageError, match="fp16 and bf16"):
        load_backend("bank+graph", source, device="cuda", dtype="fp32")
    asked: dict[str, object] = {}

    class Bank:
        tasks = ("a",)

        def __init__(self, base: object, **options: object) -> None:
            asked.update(options)

        def add(self, name: str, path: object) -> None: ...

    monkeypatch.setattr("vtk.bank.TaskBank", Bank)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "H100")
    backend = load_backend("bank+graph", source, device="cuda", dtype="bf16")
    assert asked == {"device": cuda, "dtype": torch.bfloat16, "graphs": True}
    assert (backend.name, backend.provider) == ("bank+graph", "bank of 1 task, cuda (H100), graph")
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    backend.close()
