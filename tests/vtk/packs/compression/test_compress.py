"""``vtk tasks compress``: every printed number against a plain loop over the files that were written."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.vtk.packs.compression.conftest import COLOURS, paint
from vtk.__main__ import main
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.packs.bundle import bundle_task
from vtk.packs.cards import pack_bytes, read_card
from vtk.packs.load import load_task

CLASSES = list(COLOURS)


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and lines of ``vtk tasks compress``."""
    code = main(["tasks", "compress", *map(str, words), "--workers", "0", "--json"])
    said = capsys.readouterr()
    return code, json.loads(said.out), " ".join(said.err.split())


def logits(model: nn.Module, pack: Path, paths: list[str]) -> Tensor:
    transform = eval_transform(read_card(pack).input)
    with torch.inference_mode():
        return torch.cat([model(transform(Image.open(p).convert("RGB"))[None]) for p in paths])


def test_auto_chooses_on_one_half_and_is_judged_on_the_other(
    pack: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full, photos = pack
    out = tmp_path / "small"
    code, found, said = run(capsys, full, "--data", photos, "--out", out)
    assert code == 0
    assert len(found["choosing"]) == len(found["judging"]) == 12
    assert set(found["choosing"]) | set(found["judging"]) == {str(p) for p in (photos / "val").rglob("*.png")}
    before, after = (logits(load_task(p).model, full, found["judging"]) for p in (full, out))
    labels = torch.tensor([CLASSES.index(Path(p).parent.name) for p in found["judging"]])
    judged = found["judged"]
    assert judged["images"] == 12 and 0.4 < judged["before"] < 1
    assert judged["before"] == pytest.approx(float((before.argmax(1) == labels).double().mean()))
    assert judged["after"] == pytest.approx(float((after.argmax(1) == labels).double().mean()))
    assert judged["agreement"] == pytest.approx(float((before.argmax(1) == after.argmax(1)).double().mean()))
    assert judged["low"] <= judged["drop"] == judged["before"] - judged["after"] <= judged["high"]
    assert found["pack_bytes"] == pack_bytes(out) < found["source_bytes"] == pack_bytes(full)
    chosen = next(c for c in found["candidates"] if c["threshold"] == found["threshold"])
    written = load_file(out / "task.safetensors").values()
    assert chosen["nbytes"] == found["tensors_bytes"] == sum(tensor.nbytes for tensor in written)
    assert "12 images cannot exclude a drop of up to" in said
    assert read_card(out).base == read_card(full).base
    # what `vtk eval` says of the new pack is what its card says
    assert main(["eval", str(out), str(photos), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["training_top1"] == measured["top1"] == read_card(out).metrics["top1"]


def test_a_given_rank_is_judged_on_all_held_out_images(
    pack: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full, photos = pack
    code, found, said = run(capsys, full, "--rank", 0, "--data", photos, "--out", tmp_path / "small")
    assert code == 0 and found["choosing"] == [] and len(found["judging"]) == 24 and "chosen on" not in said
    before, after = (logits(load_task(p).model, full, found["judging"]) for p in (full, tmp_path / "small"))
    labels = torch.tensor([CLASSES.index(Path(p).parent.name) for p in found["judging"]])
    agreement = float((before.argmax(1) == after.argmax(1)).double().mean())
    assert found["judged"]["agreement"] == pytest.approx(agreement) and agreement < 1
    assert found["judged"]["after"] == pytest.approx(float((after.argmax(1) == labels).double().mean()))
    assert read_card(tmp_path / "small").metrics["top1"] == found["judged"]["after"] != found["judged"]["before"]


def test_what_is_exact_is_exact_and_the_rest_is_base_plus_factors(
    pack: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = pack[0]
    code, found, said = run(capsys, full, "--rank", 3, "--pack-dtype", "fp32", "--out", tmp_path / "small")
    assert code == 0 and "nothing was measured" in said and found["judged"] is None
    assert read_card(tmp_path / "small").metrics == {}
    stored, exact = load_file(tmp_path / "small" / "task.safetensors"), load_file(full / "task.safetensors")
    base = load_task(full).base
    assert base is not None
    for name, value in exact.items():
        if name not in found["ranks"]:
            assert torch.equal(stored[name], value)
            continue
        start = base.tensors[name].double()
        change = (value.double() - start).reshape(-1, value.shape[-1])
        if found["ranks"][name]:
            kept = stored[f"{name}:b"].double() @ stored[f"{name}:a"].double()
            u, s, vh = torch.linalg.svd(change, full_matrices=False)
            r = found["ranks"][name]
            torch.testing.assert_close(kept, (u[:, :r] * s[:r]) @ vh[:r], rtol=0, atol=1e-6)
            error = (change - kept).norm() / change.norm()
            assert found["errors"][name] == pytest.approx(float(error), rel=1e-4)
    assert set(found["ranks"]) == {n for n in exact if n.endswith(("qkv.weight", "proj.weight", "pos_embed"))}
    assert sum(found["ranks"].values()) > 0 and found["positions"] == ["pos_embed"]


@pytest.mark.slow
def test_weights_of_training_images_leave_less_error_in_the_logits(
    pack: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full, photos = pack
    paths = sorted(map(str, (photos / "val").rglob("*.png")))
    exact, errors = logits(load_task(full).model, full, paths), []
    for i, more in enumerate(((), ("--data", photos), ("--data", photos, "--tune", 20))):
        code, found, _ = run(capsys, full, "--rank", 1, *more, "--out", tmp_path / str(i))
        assert code == 0
        off = logits(load_task(tmp_path / str(i)).model, full, paths) - exact
        errors.append(float((off - off.mean(dim=1, keepdim=True)).square().mean()))
    assert found["tuned"]["kl_after"] < found["tuned"]["kl_before"]
    assert errors[2] < errors[1] < errors[0]


@pytest.mark.parametrize(("words", "what"), [
    ((), "`--rank auto` chooses the rank on held-out images; give --data FOLDER, or --rank R"),
    (("--rank", "4", "--tune", "9"), "`--tune` learns from training images; give --data FOLDER"),
    (("--rank", "4", "--max-drop", "2"), "`--max-drop` is for --rank auto"),
    (("--rank", "999", "--pack-dtype", "fp32"), "factors would take more bytes than the 5 matrices themselves"),
])  # fmt: skip
def test_what_cannot_be_done_is_said_in_a_line(
    words: tuple[str, ...], what: str, pack: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, said = run(capsys, pack[0], *words, "--out", tmp_path / "small")
    assert code == 2 and what in said and not (tmp_path / "small").exists()


def test_the_pack_itself_and_bundles_are_refused(
    pack: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(pack[0], tmp_path / "copy")
    code, _, said = run(capsys, copy, "--rank", 2, "--out", copy, "--overwrite")
    assert code == 2 and "is the pack itself, which would be lost" in said
    bundle_task(pack[0], tmp_path / "bundle")
    code, _, said = run(capsys, tmp_path / "bundle", "--rank", 2, "--out", tmp_path / "small")
    assert code == 2 and "is a bundle" in said and "--base FILE" in said


def test_the_current_folder_has_no_name_to_write(
    pack: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (".", ".."):
        code, _, said = run(capsys, pack[0], "--rank", 2, "--out", out, "--overwrite")
        assert code == 2 and f"`--out` {out} has no name of its own" in said
    assert not list(tmp_path.iterdir())


def test_training_images_that_are_all_held_out_tune_nothing(
    pack: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, channel in COLOURS.items():
        paint(tmp_path / "new" / "val" / name, channel, 4, 7)
    shutil.copytree(tmp_path / "new" / "val", tmp_path / "new" / "train")
    code, _, said = run(capsys, pack[0], "--data", tmp_path / "new", "--tune", 2, "--out", tmp_path / "small")
    assert code == 2 and "all of those are copies of held-out ones" in said


def test_one_image_cannot_be_halved_and_an_unseen_folder_has_no_training_images(
    pack: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, channel in COLOURS.items():
        paint(tmp_path / "new" / name, channel, 4, 7)
    code, found, said = run(capsys, pack[0], "--data", tmp_path / "new", "--out", tmp_path / "small")
    assert code == 0 and found["weighed"] is None and "has no training images" in said
    assert read_card(tmp_path / "small").metrics == {} and "the card has no metrics" in said
    paint(tmp_path / "one" / "red", 0, 1, 7)
    code, _, said = run(capsys, pack[0], "--data", tmp_path / "one", "--out", tmp_path / "other")
    assert code == 2 and "needs two different held-out images" in said and not (tmp_path / "other").exists()


def test_a_class_that_judges_nothing_is_named(
    pack: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, count in (("blue", 0), ("green", 1), ("red", 9)):
        paint(tmp_path / "new" / name, COLOURS[name], count, 7)
    words = (pack[0], "--data", tmp_path / "new", "--metric", "balanced_accuracy", "--out", tmp_path / "small")
    code, found, said = run(capsys, *words)
    assert code == 0 and "blue" in found["judged"]["absent"] and "nothing is known of" in said
    assert found["judged"]["metric"] == "balanced_accuracy" and np.isfinite(found["judged"]["high"])


def test_a_bound_that_no_pack_keeps_writes_nothing(
    pack: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vtk.packs.compression.candidates.LEAST_LIKENESS", 1.1)
    code, _, said = run(capsys, pack[0], "--data", pack[1], "--out", tmp_path / "small")
    assert code == 4 and "no pack is within 0.50 points on the 12 images" in said and not (tmp_path / "small").exists()
