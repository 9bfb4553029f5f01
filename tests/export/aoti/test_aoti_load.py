"""``load.py`` beside a ``.pt2``: right or refused, whatever it is given, with libraries that read memory blindly."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision import tv_tensors

from tests.export._aoti_library import CHECKS, Library, loader, write_file
from vtk.runtime import aoti_load
from vtk_export.aoti.trial_process import LAYOUTS, shapeless, wrong

SHAPE = (3, 32, 48)
IMAGES = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0))


def by_place(images: Tensor) -> Tensor:
    """Logits that depend on where each value is."""
    return images.double().flatten(1) @ torch.sin(torch.arange(images[0].numel()).double())[:, None] * torch.ones(2)


@pytest.fixture
def path(packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CHECKS, "0")
    monkeypatch.setattr("torch._inductor.package.load_package", loader(by_place))
    write_file(tmp_path / "model.pt2", packed.card)
    return tmp_path / "model.pt2"


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_memory_layout_gives_the_same_answer(layout: str, batch: int, path: Path) -> None:
    images = IMAGES[:batch]
    assert torch.equal(LAYOUTS[layout](images), images)
    assert torch.equal(aoti_load.load(path)(LAYOUTS[layout](images)), by_place(images))


class Named(torch.Tensor):
    pass


def kinds() -> Iterator[tuple[str, Tensor, Tensor]]:
    with torch.inference_mode():
        inference = IMAGES.clone()
    yield "of inference mode", inference, IMAGES
    yield "wants a gradient", IMAGES.clone().requires_grad_() * 1, IMAGES
    yield "a subclass", IMAGES.as_subclass(Named), IMAGES
    yield "torchvision's", tv_tensors.Image(IMAGES), IMAGES
    last = IMAGES.to(memory_format=torch.channels_last)
    yield "wants a gradient, channels last", last.clone().requires_grad_() * 1, IMAGES
    yield "a subclass, channels last", last.as_subclass(Named), IMAGES
    yield "torchvision's, channels last", tv_tensors.Image(last), IMAGES
    yield "one image many times", IMAGES[:1].expand(5, -1, -1, -1), IMAGES[:1].repeat(5, 1, 1, 1)
    yield "backwards", IMAGES.flip(0), IMAGES[[2, 1, 0]]
    yield "part of complex numbers", torch.complex(IMAGES, -IMAGES).conj().imag, IMAGES
    yield "zeros without memory", torch._efficientzerotensor((2, *SHAPE)), torch.zeros(2, *SHAPE)


@pytest.mark.parametrize("name,images,values", [pytest.param(*k, id=k[0]) for k in kinds()])
def test_every_kind_of_tensor_with_values_gives_a_plain_answer(
    name: str, images: Tensor, values: Tensor, path: Path
) -> None:
    logits = aoti_load.load(path)(images)
    assert torch.equal(logits, by_place(values)) and type(logits) is Tensor and not logits.requires_grad


def test_memory_that_vector_instructions_cannot_load_at_once_is_copied(path: Path) -> None:
    model = aoti_load.load(path)
    for layout in ("misaligned", "contiguous"):
        model(LAYOUTS[layout](IMAGES))
    assert LAYOUTS["misaligned"](IMAGES).data_ptr() % 64 and IMAGES.data_ptr() % 64 == 0
    given = model._models["batch_n"].pointers
    assert given[0] % 64 == 0 and given[1] == IMAGES.data_ptr()  # what is aligned is not copied


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("images", [IMAGES, IMAGES[:1]], ids=["several", "one"])
def test_what_it_was_not_made_for_is_refused(images: Tensor, path: Path) -> None:
    model = aoti_load.load(path)
    bad = dict(wrong(images, model.max_batch)) | dict(shapeless(images))
    bad |= {
        "nested": torch.nested.nested_tensor(list(images)),
        "without values": FakeTensorMode().from_tensor(images), "complex": images.to(torch.complex64),
    }  # fmt: skip
    for name, value in bad.items():
        with pytest.raises((TypeError, ValueError), match="images are"):
            pytest.fail(f"answered: {name} {model(value)}")
    assert not any(library.pointers for library in model._models.values())  # neither a probe nor one of these ran


def test_images_whose_memory_was_given_up_are_refused(path: Path) -> None:
    model = aoti_load.load(path)
    for left in (0, 8):
        images = torch.rand(2, *model.shape)
        images.untyped_storage().resize_(left)
        with pytest.raises(ValueError, match="memory was given up"):
            model(images)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_process_forked_while_a_thread_was_in_a_call_can_call(path: Path) -> None:
    model = aoti_load.load(path)
    with model._alone:  # as a thread that is not there after the fork
        child = os.fork()
        if not child:
            os._exit(0 if model._alone.acquire(timeout=5) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_variable_is_set_for_the_first_calls_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = aoti_load.load(path)
    assert all(library.checking for library in model._models.values())
    assert aoti_load.os.environ[CHECKS] == "0"
    monkeypatch.delenv(CHECKS)
    aoti_load.load(path)
    assert CHECKS not in aoti_load.os.environ


def test_a_library_that_does_not_check_is_not_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.package.load_package", loader(by_place, checked="ANOTHER_VARIABLE"))
    with pytest.raises(RuntimeError, match="batch_1 does not check its input"):
        aoti_load.load(path)


@pytest.mark.parametrize("names,changed,said", [
    (("model",), {}, "has no model batch_n"),
    (("batch_1", "batch_n"), {"vtk.torch": "2.1"}, "made with torch 2.1"),
    (("batch_1", "batch_n"), {"AOTI_DEVICE_KEY": "cuda"}, "made for a GPU|made for compute capability"),
    (("batch_1", "batch_n"), {"AOTI_MACHINE": "riscv128"}, "made for riscv128"),
])  # fmt: skip
def test_a_file_for_another_machine_is_refused_before_it_is_loaded(
    names: tuple[str, ...], changed: dict[str, str], said: str, packed, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch._inductor.package.load_package", lambda *_, **__: pytest.fail("loaded"))
    write_file(path, packed.card, names, **({"AOTI_COMPUTE_CAPABILITY": "00"} | changed))
    with pytest.raises(RuntimeError, match=said):
        aoti_load.load(path)


def test_calls_of_several_threads_follow_each_other() -> None:
    inside: list[int] = []
    most = 0

    def slow(images: Tensor) -> Tensor:
        nonlocal most
        inside.append(1)
        time.sleep(0.005)  # another thread may come
        most = max(most, len(inside))
        inside.pop()
        return by_place(images)

    models = {"batch_1": slow, "batch_n": slow}
    model = aoti_load.Model(models, SHAPE, torch.float32, torch.device("cpu"), 8)
    right: list[bool] = []

    def client(number: int) -> None:
        images = IMAGES[: 1 + number % 3] + number
        with pytest.raises(ValueError):
            model(images[:0])
        right.append(torch.equal(model(images), by_place(images)))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert right == [True] * 9 and most == 1


def test_a_call_that_fails_leaves_the_next_ones_free() -> None:
    def failing(images: Tensor) -> Tensor:
        if images.isnan().any():
            raise RuntimeError("out of memory")
        return by_place(images)

    model = aoti_load.Model({"batch_1": failing, "batch_n": failing}, SHAPE, torch.float32, torch.device("cpu"), 8)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(IMAGES * torch.nan)
    assert torch.equal(model(IMAGES), by_place(IMAGES))


def test_the_stand_in_is_as_blind_as_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECKS, "0")
    library = Library(by_place, SHAPE, 2, 8)
    other = LAYOUTS["channels_last"](IMAGES)
    assert torch.equal(library(IMAGES), by_place(IMAGES)) and not torch.equal(library(other), by_place(IMAGES))
