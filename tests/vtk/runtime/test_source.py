import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import timm
import torch
from safetensors.torch import save_file

from vtk.card import Card, InputSpec, ModelSpec
from vtk.errors import DataError, UsageError
from vtk.formats import write_json
from vtk.runtime.opening import open_source

Write = Callable[..., Path]


def test_onnx_with_a_card_says_what_it_is(write_onnx: Write, card: Card) -> None:
    source = open_source(write_onnx("pets/model.onnx", card=card))
    assert (source.kind, source.name, source.described, source.card) == ("onnx", "pets", True, card)
    source.require_description("eval")
    assert open_source(source.path.parent).card == card  # type: ignore[union-attr]


def test_bare_onnx_is_read_from_its_shapes_and_refused_where_classes_matter(write_onnx: Write) -> None:
    source = open_source(write_onnx("bare.onnx"))
    assert source.card.input.size == (4, 6)
    assert source.card.classes == ("0", "1", "2")
    assert not source.described
    with pytest.raises(UsageError, match=r"`vtk eval`: bare.onnx carries no vtk card.*`vtk export onnx`"):
        source.require_description("eval")
    with pytest.raises(UsageError, match="ONNX file, not a torch model"):
        source.model()


def test_an_onnx_file_with_a_card_is_not_taken_with_other_names_than_its_facts_say(
    write_onnx: Write, card: Card
) -> None:
    assert open_source(write_onnx("other.onnx", output="scores")).facts.names == {"logits": "scores"}
    with pytest.raises(DataError, match=r"its card says .* its graph \[.*export it again"):
        open_source(write_onnx("ours.onnx", output="scores", card=card))


@pytest.mark.parametrize("content", [b"", b"\x00garbage", b"<html>not found</html>"])
def test_damaged_onnx_is_a_data_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.onnx").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.onnx"):
        open_source(tmp_path / "x.onnx")


class _Trap:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.target, "w")


@pytest.mark.parametrize("name", ["x.pth", "x.pt", "x.bin", "x.ckpt", "x.pkl"])
def test_pickles_are_refused_and_not_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(_Trap(str(tmp_path / "ran"))))
    with pytest.raises(DataError, match="is a pickle, which can run code"):
        open_source(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_run_folder_means_its_best_pack_and_says_so(tmp_path: Path, card: Card) -> None:
    write_json(tmp_path / "pets" / "task" / "task.json", card.to_dict())
    source = open_source(tmp_path / "pets")
    assert (source.kind, source.name, source.path) == ("pack", "pets", tmp_path / "pets" / "task")
    (note,) = source.notes
    assert "is a run folder; its best pack is taken" in note
    assert open_source(tmp_path / "pets" / "task").notes == ()
    assert open_source(tmp_path / "pets" / "task" / "task.json").path == tmp_path / "pets" / "task"


def test_pack_is_found_after_a_writer_was_stopped_between_its_two_renames(tmp_path: Path, card: Card) -> None:
    write_json(tmp_path / "pets" / "task.old" / "task.json", card.to_dict())
    assert open_source(tmp_path / "pets" / "task").card == card
    assert open_source(tmp_path / "pets").card == card


def test_merged_checkpoint_is_the_timm_model_it_holds(tmp_path: Path) -> None:
    model = timm.create_model("test_vit2", pretrained=False, num_classes=3, img_size=64).eval()
    spec = InputSpec(64, 64)
    card = Card(ModelSpec("test_vit2"), spec, ("a", "b", "c"))
    save_file(model.state_dict(), tmp_path / "m.safetensors", metadata={"vtk": card.to_json()})
    source = open_source(tmp_path / "m.safetensors")
    assert source.kind == "checkpoint"
    images = torch.randn(2, 3, 64, 64)
    loaded = source.model()
    assert not loaded.training
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))


def test_checkpoint_without_a_card_is_refused(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "m.safetensors")
    with pytest.raises(DataError, match="has no vtk card"):
        open_source(tmp_path / "m.safetensors")


def test_timm_name_takes_size_and_classes() -> None:
    source = open_source("test_vit", pretrained=False, num_classes=5, img_size=(32, 64))
    assert (source.kind, source.path, source.card.input.size, len(source.card.classes)) == ("timm", None, (32, 64), 5)
    with pytest.raises(UsageError, match=r"`vtk predict`: test_vit has no class names; fine-tune it"):
        source.require_description("predict")
    square = open_source("test_vit", pretrained=False, num_classes=5, img_size=32, seed=3)
    first, second = square.model(), square.model()
    assert first is not second
    assert torch.equal(first(torch.ones(1, 3, 32, 32)), second(torch.ones(1, 3, 32, 32)))


def test_timm_name_without_a_classifier_needs_a_number_of_classes() -> None:
    with pytest.raises(UsageError, match="has no classifier of its own; give --num-classes"):
        open_source("vit_small_patch14_dinov2", pretrained=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no/such/folder", "does not exist"),
        ("nothing.onnx", "does not exist"),
        ("vit_smal_patch16_224", "neither a file nor a folder here, and as a model name.*vit_small_patch16_224"),
    ],
)
def test_what_is_neither_file_nor_model_is_named(text: str, message: str) -> None:
    with pytest.raises((DataError, UsageError), match=message):
        open_source(text)


def test_flags_of_timm_names_are_refused_for_files(write_onnx: Write, card: Card, tmp_path: Path) -> None:
    path = write_onnx(card=card)
    for options, flag in (({"img_size": 8}, "--img-size"), ({"num_classes": 2}, "--num-classes"),
                          ({"pretrained": False}, "--no-pretrained"), ({"base": tmp_path}, "--base")):  # fmt: skip
        with pytest.raises(UsageError, match=flag):
            open_source(path, **options)  # type: ignore[arg-type]


def test_folders_of_several_models_and_adapters_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "pets.onnx").touch()
    with pytest.raises(DataError, match=r"of several models; give one of its files, such as .*pets\.onnx"):
        open_source(tmp_path / "all")
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(DataError, match="is a PEFT adapter; `vtk tasks from-peft "):
        open_source(tmp_path)


def test_other_files_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match="is none of: task pack"):
        open_source(tmp_path / "notes.txt")
    with pytest.raises(DataError, match=r"without task.json, task/task.json or model.onnx"):
        open_source(tmp_path)


def test_card_of_a_newer_version_is_refused(write_onnx: Write, card: Card) -> None:
    path = write_onnx(card=card)
    model = onnx.load(path)
    (entry,) = [prop for prop in model.metadata_props if prop.key == "vtk"]
    entry.value = json.dumps({**json.loads(entry.value), "schema": 99})
    onnx.save(model, path)
    with pytest.raises(DataError, match="newer vtk"):
        open_source(path)


@pytest.mark.parametrize(
    "change",
    [{"input": InputSpec(8, 6)}, {"input": InputSpec(4, 6, 1, (0.5,), (0.5,))}, {"classes": ("a", "b")}],
    ids=str,
)
def test_a_card_that_contradicts_its_graph_is_refused(write_onnx: Write, card: Card, change: dict[str, object]) -> None:
    with pytest.raises(DataError, match=r"its card says .*, its graph \[3, 4, 6, 3\]"):
        open_source(write_onnx(card=dataclasses.replace(card, **change)))  # type: ignore[arg-type]
