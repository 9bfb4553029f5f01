"""What version 0.1 wrote is still read, and gives what it gave then: packs, runs, checkpoints, ONNX files, results."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import vtk
from vtk.__main__ import main
from vtk.data.decoding.images import load_image
from vtk.data.loading.eval_pipeline import eval_transform

MADE = Path(__file__).resolve().parents[1] / "fixtures" / "v0_1"
RECORDED = json.loads((MADE / "logits.json").read_text())
IMAGES = [Path(name) for name in RECORDED["images"]]
STORED = "repositories/vtk/bank/1/base.safetensors"
"""A base as version 0.1 kept it in $VTK_HOME."""

UNFINISHED = "runs/finished/task-last"
PACKS = sorted(set(RECORDED["logits"]) - {UNFINISHED, "digits.safetensors", "exports/preproc/model.onnx"})
BASE = ("--base", "base.safetensors")
TOLERANCE = 1e-5


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a user of version 0.1."""
    here = shutil.copytree(MADE, tmp_path / "user")
    monkeypatch.chdir(here)
    return here


@pytest.fixture
def kept(folder: Path, vtk_home: Path) -> Path:
    """The same, with the base in $VTK_HOME: where the cards say it was, it is no more."""
    base = json.loads(Path("runs/digits/task/task.json").read_text())["base"]
    assert not Path(base["source"]).exists()
    (vtk_home / "bases").mkdir()
    shutil.copyfile(STORED, vtk_home / "bases" / f"{base['id']}.safetensors")
    return folder


def wanted(name: str) -> np.ndarray:
    return np.array(RECORDED["logits"][name], np.float32)


def pixels(spec: Any) -> Tensor:
    transform = eval_transform(spec)
    return torch.stack([transform(load_image(path)) for path in IMAGES])


def check(model: torch.nn.Module, spec: Any, name: str) -> None:
    with torch.no_grad():
        np.testing.assert_allclose(model(pixels(spec)).numpy(), wanted(name), atol=TOLERANCE, rtol=0)


def result(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    code = main([*argv, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize("name", PACKS)
def test_a_pack_gives_its_logits(kept: Path, name: str) -> None:
    given = vtk.load_task(name, base="base.safetensors")
    found = vtk.load_task(name)
    for task in (given, found):
        check(task.model, task.card.input, name)
        assert task.card.versions["vtk"] == "0.1.0"
    assert vtk.open_source(name).kind == "pack"


def test_a_bundle_and_a_merged_checkpoint_need_no_base(folder: Path) -> None:
    task = vtk.load_task("digits.vtkbundle")
    check(task.model, task.card.input, "digits.vtkbundle")
    source = vtk.open_source("digits.safetensors")
    assert source.kind == "checkpoint" and source.card.classes == ("one", "two", "zero")
    check(source.model(), source.card.input, "digits.safetensors")


def test_the_metric_of_the_run_comes_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = json.loads(Path("runs/digits/task/task.json").read_text())
    found = result(capsys, "eval", "runs/digits", "data/digits", *BASE)
    assert found["same_conditions"] and found["top1"] == card["metrics"]["top1"]
    assert found["loss"] == pytest.approx(card["metrics"]["loss"], abs=TOLERANCE)


@pytest.mark.parametrize("name", ["runs/digits", "exports/onnx/model.onnx", "exports/files/digits.onnx"])
def test_the_labels_and_scores_of_images(kept: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    found = result(capsys, "predict", name, "data/digits/val", "--top-k", "3", "--out", "p.csv")["predictions"]
    assert [Path(entry["path"]) for entry in found] == IMAGES
    shares = torch.from_numpy(wanted("runs/digits")).softmax(1)
    for entry, row in zip(found, shares, strict=True):
        order = row.argsort(descending=True)
        assert entry["labels"] == [("one", "two", "zero")[i] for i in order]
        np.testing.assert_allclose(entry["scores"], row[order], atol=TOLERANCE)
    with Path("p.csv").open() as file:
        assert len(list(csv.reader(file))) == len(IMAGES) + 1


@pytest.mark.parametrize("backend", ["ort-cpu", "openvino"])
def test_a_file_of_gathered_tasks_gives_each_image_its_task_s_logits(folder: Path, backend: str) -> None:
    source = vtk.open_source("exports/gathered/gathered.onnx", many=True)
    assert source.tasks == ("a", "b")  # of one pack, so that both have the recorded logits
    numbers = torch.tensor([0, 1] * 3, dtype=torch.int32)
    found = vtk.load_backend(backend, source).run({"pixel_values": pixels(source.card.input), "task": numbers})
    np.testing.assert_allclose(found["logits"].numpy(), wanted("runs/digits"), atol=TOLERANCE, rtol=0)
    assert found["num_classes"].tolist() == [3] * 6


# OpenVINO resizes by code of its own, not to the same level of 255: outputs within half of what Pillow's may differ by
@pytest.mark.parametrize("backend,tolerance", [("ort-cpu", TOLERANCE), ("openvino", 0.01)])
def test_a_file_with_preprocessing_in_its_graph_takes_images(folder: Path, backend: str, tolerance: float) -> None:
    source = vtk.open_source("exports/preproc/model.onnx")
    assert source.facts.preprocessing
    images = torch.stack([torch.from_numpy(np.array(load_image(path).convert("RGB"))) for path in IMAGES])
    found = vtk.load_backend(backend, source, raw=True).run({"images": images})
    name = "exports/preproc/model.onnx"
    np.testing.assert_allclose(found["probabilities"].numpy(), wanted(name), atol=tolerance, rtol=0)
    assert np.abs(wanted(name) - torch.from_numpy(wanted("runs/digits")).softmax(1).numpy()).max() < 0.02


def test_packs_are_listed_compared_and_merged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = {entry["path"]: entry for entry in result(capsys, "tasks", "list", "runs")["packs"]}
    assert listed["runs/digits/task"]["classes"] == 3 and listed["runs/parity/task"]["height"] == 48
    assert len({entry["base"] for entry in listed.values()}) == 1
    found = result(capsys, "tasks", "diff", "runs/digits", "runs/parity", *BASE)
    assert found["ffn_tensors"] == found["shared_ffn_tensors"] == 8
    result(capsys, "tasks", "merge", "runs/digits", "--out", "again.safetensors", *BASE)
    then, now = load_file("digits.safetensors"), load_file("again.safetensors")
    assert then.keys() == now.keys() and all(torch.equal(then[key], now[key]) for key in then)


def test_an_adapter_becomes_the_pack_it_was_made_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result(capsys, "tasks", "from-peft", "digits-peft", "--out", "back")
    task = vtk.load_task("back")
    check(task.model, task.card.input, "runs/digits")


@pytest.mark.parametrize("config", ["finetune.yaml", "runs/digits/config.yaml"])
def test_a_stopped_run_is_finished_as_then(kept: Path, capsys: pytest.CaptureFixture[str], config: str) -> None:
    argv = ("--config", config, "--weights", "base.safetensors", "--out", "runs/digits", "--resume")
    found = result(capsys, "finetune", "data/digits", *argv)
    assert found["epochs"] == 3
    task = vtk.load_task("runs/digits/task-last", base="base.safetensors")
    check(task.model, task.card.input, UNFINISHED)


def test_a_stopped_run_of_two_tasks_is_finished(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its task `digits` saw the batches of the run of its own, and ends with its weights."""
    argv = ("--task", "digits=data/digits", "--task", "parity=data/parity@48", "--config", "finetune.yaml")
    result(capsys, "finetune", *argv, "--out", "runs/both", "--resume")
    assert json.loads(Path("runs/both/last/state.json").read_text())["epoch"] == 3
    task = vtk.load_task("runs/both/digits/task-last")
    check(task.model, task.card.input, UNFINISHED)


def test_a_recipe_of_one_s_own_still_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", "vit_tiny_patch16_224", "--model-kwargs", "depth=2,embed_dim=16,num_heads=2,patch_size=8"]
    result(capsys, "train", "data/digits", "--recipe", "recipe.yaml", *argv, "--img-size", "32", "--out", "runs/new")
    card = vtk.open_source("runs/new/model.safetensors").card
    assert "--recipe recipe.yaml" in card.command and card.classes == ("one", "two", "zero")


@pytest.mark.slow
def test_an_export_takes_the_place_of_an_earlier_one(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packs = ("x=runs/digits", "y=runs/parity")
    result(capsys, "export", "tasks", *packs, "--out", "exports/files", "--overwrite")
    names = {path.name for path in Path("exports/files").iterdir()}
    assert {"x.onnx", "y.onnx"} < names and not {"digits.onnx", "digits.json", "parity.onnx"} & names


def test_results_are_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = json.loads(Path("profile/profile.json").read_text())
    for cell in value["backends"][0]["cells"]:
        cell["p50_ms"] *= 3
    Path("slower.json").write_text(json.dumps(value))
    argv = ["profile", "--compare", "profile/profile.json,slower.json", "--json"]
    assert main([*argv, "--fail-above", "5"]) == 4
    changes = json.loads(capsys.readouterr().out)
    assert changes["failed"] == 2
    found = result(capsys, "analyze", "--compare", "analysis", "analysis", "--out", "both")
    assert "entropy" in json.dumps(found) and Path("both/report.html").is_file()
