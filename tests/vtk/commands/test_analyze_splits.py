"""Which part of a folder ``vtk analyze`` measures the loss on, what it says of it, and what a protocol records."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file

from vtk.__main__ import main
from vtk.analysis.config import AnalyzeCommand
from vtk.analysis.images import Selection, choose_images, trained_cards
from vtk.card import Card, InputSpec, ModelSpec
from vtk.data.audit.folder_scan import scan
from vtk.data.record import record_of
from vtk.models.create import build_model
from vtk.packs.load import card_metadata
from vtk.runtime.source import Source

CLASSES = ("blue", "green", "red")
KWARGS = {"depth": 1, "embed_dim": 16, "num_heads": 2}


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without plots, which take longer than what is tested here."""
    monkeypatch.setattr("vtk.analysis.analyze.draw", lambda analyses, out: {})


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six training and three held-out images of each class, 32 px, as PNG."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 3)):
        for name in CLASSES:
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    created = build_model(
        "vit_tiny_patch16_224", num_classes=3, img_size=32, pretrained=False, seed=0, kwargs=KWARGS
    )  # fmt: skip
    with torch.no_grad():
        created.model.head.weight.add_(torch.randn_like(created.model.head.weight))
    path = tmp_path_factory.mktemp("model") / "m.safetensors"
    save_file(created.model.state_dict(), path, metadata=card_metadata(Card(ModelSpec("vit_tiny_patch16_224", KWARGS),
                                                                            InputSpec(32, 32), CLASSES)))  # fmt: skip
    return path


def raw_loss(model: Path, folder: Path) -> float:
    """The cross-entropy of all images below a folder, read and normalised here."""
    from safetensors.torch import load_file

    vit = build_model(
        "vit_tiny_patch16_224", num_classes=3, img_size=32, pretrained=False, seed=1, kwargs=KWARGS
    ).model.eval()  # fmt: skip
    vit.load_state_dict(load_file(model))
    files = sorted(folder.rglob("*.png"))
    spec = InputSpec(32, 32)
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(f))).permute(2, 0, 1) / 255 for f in files])
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (spec.mean, spec.std))
    labels = torch.tensor([CLASSES.index(f.parent.name) for f in files])
    with torch.no_grad():
        return float(F.cross_entropy(vit((pixels - mean) / std), labels))


def analyse(model: Path, data: Path, out: Path, *more: object) -> int:
    words = ["analyze", model, "--data", data, "--out", out, "--workers", 0, "--device", "cpu", *more]
    return main([str(word) for word in words])


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said since the last call, on one line."""
    return " ".join("".join(capsys.readouterr()).split())


def results(out: Path) -> dict:
    return json.loads((out / "analysis.json").read_text())


@pytest.mark.parametrize(
    ("more", "part", "kind"),
    [((), "train", "training"), (("--split", "val"), "val", "held-out"), (("--split", "all"), ".", "all")],
    ids=["default", "held-out", "all"],
)
def test_the_loss_is_that_of_the_images_it_names(more, part, kind, photos, model, tmp_path, capsys) -> None:
    assert analyse(model, photos, tmp_path, "--what", "flatness", "--draws", 2, "--sigma", 1e-6, *more) == 0
    found = results(tmp_path)
    assert found["results"]["flatness"]["loss"] == pytest.approx(raw_loss(model, photos / part), rel=1e-4)
    assert found["results"]["flatness"]["measurement"]["images"] == kind
    assert found["facts"]["options"]["flatness"]["split"] == {"training": "train", "held-out": "val"}.get(kind, kind)
    assert f"Measured on {kind} images" in printed(capsys)
    assert f"loss, {kind} images" in (tmp_path / "report.html").read_text("utf-8")


def test_a_folder_without_training_images_gives_held_out_ones_and_says_so(photos, model, tmp_path, capsys) -> None:
    only = tmp_path / "only"
    (only / "val").parent.mkdir()
    (only / "val").symlink_to(photos / "val")
    assert analyse(model, only, tmp_path / "out", "--what", "miss-rate,neurons") == 0
    told = printed(capsys)
    found = results(tmp_path / "out")["results"]["miss-rate"]
    assert found["measurement"]["images"] in ("held-out", "all") and found["pairs"] == 9
    assert f"Measured on {found['measurement']['images']} images" in told
    assert f"neurons, miss-rate take {found['measurement']['images']} images, unlike in the papers" in told
    assert analyse(model, only, tmp_path / "strict", "--what", "miss-rate", "--split", "train") == 3


def test_a_protocol_is_printed_and_recorded_and_explicit_options_are_named(photos, model, tmp_path, capsys) -> None:
    more = ("--protocol", "chen", "--what", "hessian-blocks,neurons", "--hessian-iterations", 4)
    assert analyse(model, photos, tmp_path, *more) == 0
    told = printed(capsys)
    assert (
        "protocol chen (Chen et al. 2022)" in told and "section 4.4: a tenth of the training set): 2 training" in told
    )
    assert "hessian-blocks: split train, 10 % of its images" in told and "--hessian-iterations given, unlike" in told
    facts = results(tmp_path)["facts"]
    assert facts["protocol"] == "chen (Chen et al. 2022)" and "2 training images" in facts["images"]
    settings = facts["protocol settings"]["hessian-blocks"]
    assert (settings["images"], settings["kind"], settings["hessian_method"]) == (2, "training", "power")
    assert facts["options"]["hessian-blocks"]["hessian_iterations"] == settings["hessian_iterations"] == 4
    assert results(tmp_path)["results"]["hessian-blocks"]["images"] == 2
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "protocol: chen (Chen et al. 2022)" in page and "protocol settings" not in page


def test_curvature_names_the_images_that_it_takes_not_those_that_are_loaded(photos, model, tmp_path, capsys) -> None:
    more = ("--what", "ntk,miss-rate", "--hessian-images", 5)
    assert analyse(model, photos, tmp_path, *more) == 0
    found = results(tmp_path)
    assert found["results"]["ntk"]["images"] == 5 and found["results"]["miss-rate"]["pairs"] == 18
    assert found["facts"]["images"].startswith("5 training images (ntk); 18 training images (miss-rate), drawn")


def test_results_of_another_part_of_the_folder_are_kept_for_a_resume(photos, model, tmp_path) -> None:
    assert analyse(model, photos, tmp_path, "--what", "miss-rate") == 0
    first = (tmp_path / "results" / "miss-rate.json").read_bytes()
    assert analyse(model, photos, tmp_path, "--what", "similarity", "--resume") == 0
    assert (tmp_path / "results" / "miss-rate.json").read_bytes() == first
    assert analyse(model, photos, tmp_path, "--what", "miss-rate", "--split", "val", "--resume") == 0
    changed = json.loads((tmp_path / "results" / "miss-rate.json").read_bytes())
    assert changed["result"]["pairs"] == 9 and json.loads(first)["result"]["pairs"] == 18


def test_two_models_take_the_training_images_that_both_were_trained_on(photos, capsys) -> None:
    audit = scan(photos / "train")
    sources = []
    for held in ("0.png", "5.png"):  # each held out another image of every class
        val = tuple(sample for sample in audit.samples if sample.path.name == held)
        train = tuple(sample for sample in audit.samples if sample.path.name != held)
        record = record_of(dataclasses.replace(audit, train=train, val=val))
        data = {"layout": "flat", "images": record.to_dict()}
        card = Card(ModelSpec("vit_tiny_patch16_224", KWARGS), InputSpec(32, 32), CLASSES, data=data)
        sources.append(Source("checkpoint", "m", None, card))
    config = AnalyzeCommand(model="m", data=photos / "train", workers=0)
    both = trained_cards(sources)
    shared = [choose_images(source, config, both, split="train") for source in sources]
    assert [len(one.samples) for one in shared] == [12, 12] and shared[0].digest() == shared[1].digest()
    assert [one.kind for one in shared] == ["training", "training"]
    assert "left out: 3 images that the other model was not trained on" in printed(capsys)
    alone = Selection(sources[1], config).of("hessian-blocks")
    assert (len(alone.samples), alone.kind) == (15, "training")
    assert Selection(sources[1], config).of("entropy").kind == "held-out"
