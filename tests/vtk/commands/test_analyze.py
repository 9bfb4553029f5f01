"""``vtk analyze`` as a person meets it: files, exit codes, resuming, two models side by side."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

import vtk.analysis.run
from tests.vtk._faults import tree
from vtk.__main__ import main
from vtk.card import Card, InputSpec, ModelSpec
from vtk.models.create import build_model
from vtk.packs.load import card_metadata

CLASSES = ("blue", "green", "red")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for part in ("train", "val"):
        for label, name in enumerate(CLASSES):
            (root / part / name).mkdir(parents=True)
            for i in range(4):
                pixels = rng.integers(0, 150, (24, 24, 3))
                pixels[..., 2 - label] += 100
                Image.fromarray(pixels.astype(np.uint8)).save(root / part / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two small ViTs that differ in their weights, a ResNet, and a ViT of other classes."""
    root = tmp_path_factory.mktemp("models")
    small = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    cases: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
        "a": ("vit_tiny_patch16_224", small, CLASSES),
        "b": ("vit_tiny_patch16_224", small, CLASSES),
        "resnet": ("resnet18", {"layers": [1, 1, 1, 1]}, CLASSES),
        "other": ("vit_tiny_patch16_224", small, ("cat", "dog")),
    }
    found = {}
    for seed, (key, (name, kwargs, classes)) in enumerate(cases.items()):
        size = 32 if "vit" in name else None
        created = build_model(name, num_classes=len(classes), img_size=size, pretrained=False, seed=seed, kwargs=kwargs)
        card = Card(ModelSpec(name, kwargs), InputSpec(32, 32), classes)
        found[key] = root / f"{key}.safetensors"
        save_file(created.model.state_dict(), found[key], metadata=card_metadata(card))
    return found


def analyse(*argv: object) -> int:
    return main(["analyze", *map(str, argv), "--workers", "0", "--device", "cpu"])


def test_one_model_gives_json_plots_and_a_page(photos, models, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    argv = [models["a"], "--data", photos, "--what", "entropy,similarity", "--out", out, "--json"]
    assert analyse(*argv) == 0
    (found,) = json.loads(capsys.readouterr().out)["analyses"]
    assert list(found["results"]) == ["entropy", "similarity"] and not found["refused"]
    assert json.loads((out / "analysis.json").read_text()) == found
    assert len(found["results"]["entropy"]["layers"]) == 2 and found["results"]["entropy"]["images"] == 12
    for name in ("entropy.png", "entropy.svg", "similarity.png"):
        assert (out / "figures" / name).stat().st_size > 1000
    page = (out / "report.html").read_text("utf-8")
    assert page.startswith("<!doctype html>") and "data:image/png;base64," in page and "http://" not in page
    assert not list(out.rglob("*.tmp-*"))


def test_a_second_run_needs_a_flag_and_measures_what_is_new(photos, models, tmp_path, capsys, monkeypatch) -> None:
    out = tmp_path / "out"
    assert analyse(models["a"], "--data", photos, "--what", "entropy", "--out", out) == 0
    before = (out / "results" / "entropy.json").read_bytes()
    assert analyse(models["a"], "--data", photos, "--what", "entropy", "--out", out) != 0
    assert "is not empty" in capsys.readouterr().err
    other = [models["a"], "--data", photos, "--what", "similarity", "--out", out, "--resume"]
    assert analyse(*other) == 0
    assert (out / "results" / "entropy.json").read_bytes() == before and not (out / "figures" / "entropy.png").exists()
    argv = [models["a"], "--data", photos, "--what", "entropy,similarity", "--out", out, "--resume"]
    monkeypatch.setattr("vtk.analysis.diagnostics.entropy.attention_entropy", lambda *a, **k: pytest.fail("again"))
    assert analyse(*argv) == 0
    assert (out / "results" / "entropy.json").read_bytes() == before
    monkeypatch.undo()
    changed = [models["b"], "--data", photos, "--what", "entropy", "--out", out, "--resume"]
    assert analyse(*changed) == 0  # another model: nothing of the old one is taken
    assert (out / "results" / "entropy.json").read_bytes() != before


def test_an_earlier_report_stays_until_the_new_one_is_whole(photos, models, tmp_path, capsys, monkeypatch) -> None:
    out = tmp_path / "out"
    argv = ["--data", photos, "--out", out, "--what"]
    assert analyse(models["a"], *argv, "entropy,similarity") == 0
    before = tree(out)
    with monkeypatch.context() as patch:  # Ctrl-C in the second of two diagnostics
        patch.setattr("vtk.analysis.run._measured", stop_at("similarity", vtk.analysis.run._measured))
        assert analyse(models["b"], *argv, "entropy,similarity", "--overwrite") == 130
    now = tree(out)
    assert {name: data for name, data in now.items() if not name.startswith(".vtk-")} == before
    assert ".vtk-waiting/entropy.json" in now
    monkeypatch.setattr("vtk.analysis.diagnostics.entropy.attention_entropy", lambda *a, **k: pytest.fail("again"))
    assert analyse(models["b"], *argv, "entropy", "--resume") == 0
    after = tree(out)
    assert after["results/entropy.json"] == now[".vtk-waiting/entropy.json"] != before["results/entropy.json"]
    assert set(after) == {name for name in before if "similarity" not in name}  # nothing of the other model is left


def stop_at(name: str, measured: Callable[..., Any]) -> Callable[..., Any]:
    def stopped(one: Any, *args: Any) -> Any:
        if one.name == name:
            raise KeyboardInterrupt
        return measured(one, *args)

    return stopped


def test_what_a_model_lacks_is_said(photos, models, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    argv = [models["resnet"], "--data", photos, "--out", out, "--json", "--what"]
    assert analyse(*argv, "entropy,variance") == 5  # asked for by name
    (found,) = json.loads(capsys.readouterr().out)["analyses"]
    assert list(found["results"]) == ["variance"] and "no attention" in found["refused"]["entropy"]
    assert "no attention" in (out / "report.html").read_text("utf-8")


def test_two_models_are_put_side_by_side(photos, models, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    argv = ["--data", photos, "--what", "entropy", "--json"]
    assert analyse("--compare", models["a"], models["b"], *argv, "--out", out) == 0
    first, second = json.loads(capsys.readouterr().out)["analyses"]
    assert first["label"] != second["label"] and first["results"] != second["results"]
    assert first["facts"]["images digest"] == second["facts"]["images digest"]
    folders = [path.parent for path in sorted(out.glob("*/analysis.json"))]
    assert len(folders) == 2
    again = tmp_path / "again"  # from what was written, without model or images
    assert analyse("--compare", *folders, "--json", "--out", again) == 0
    assert json.loads(capsys.readouterr().out)["analyses"] == [first, second]
    assert (again / "figures" / "entropy.png").read_bytes() == (out / "figures" / "entropy.png").read_bytes()


def test_flags_of_timm_names_go_to_the_timm_model_of_a_pair(photos, models, tmp_path, capsys) -> None:
    argv = ["--no-pretrained", "--num-classes", 3, "--img-size", 64, "--data", photos, "--what", "entropy", "--json"]
    assert analyse("--compare", "test_vit", models["a"], *argv, "--out", tmp_path / "out") == 0
    told = [one["facts"]["input"] for one in json.loads(capsys.readouterr().out)["analyses"]]
    assert told == ["3×64×64", "3×32×32"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["a"], "no images were given; give a folder with --data"),
        (["a", "--data", "photos", "--img-size", "64"], "`--img-size` is for timm model names"),
        (["--compare", "a", "b", "--data", "photos", "--num-classes", "3"], "`--num-classes` is for timm model names"),
        (["a", "--data", "photos", "--no-pretrained"], "`--no-pretrained` is for timm model names"),
        (["a", "--data", "photos", "--base", "b"], "`--base` is for task packs"),
        (["test_vit", "--data", "photos", "--base", "b", "--no-pretrained"], "`--base` is for task packs"),
        (["other", "--data", "photos"], "class"),
        (["a", "--data", "nowhere"], "nowhere"),
        (["nowhere/x", "--data", "photos"], "does not exist"),
        (["--compare", "a", "nowhere/x", "--data", "photos"], "does not exist"),
        (["--compare", "photos", "a", "--data", "photos"], "give a pack or a run folder"),
    ],
    ids=[
        "no data",
        "a size",
        "classes",
        "no weights",
        "a base",
        "a base of timm",
        "other classes",
        "no folder",
        "no model",
        "no second model",
        "a folder of images",
    ],
)
def test_mistakes_are_one_line(argv, said, photos, models, tmp_path, capsys) -> None:
    paths = {**models, "photos": photos}
    assert analyse(*(paths.get(word, word) for word in argv), "--what", "entropy", "--out", tmp_path / "out") in (2, 3)
    told = capsys.readouterr().err.strip().splitlines()
    assert said in told[-1] and told[-1].startswith("vtk analyze: error: ")
