"""``--data`` of exports: held-out images judge a file and training images calibrate it, as in every other command."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vtk.__main__ import main
from vtk.data.audit.folder_scan import scan
from vtk.data.record import record_of
from vtk.errors import DataError, UsageError
from vtk.packs.cards import read_card
from vtk.packs.load import load_task
from vtk.packs.pack import update_card
from vtk.runtime.data_option import data_images, folders_of


@pytest.fixture
def trained(calm: Any, tmp_path: Path) -> tuple[Path, Path]:
    """The pack, and a flat folder of its classes that its card says it was trained on."""
    shutil.copytree(calm.path.parent, tmp_path / "own")
    pack, data = tmp_path / "own/task", tmp_path / "data"
    card = read_card(pack)
    rng = np.random.default_rng(3)
    for name in card.classes:
        (data / name).mkdir(parents=True)
        for i in range(10):
            Image.fromarray(rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(data / name / f"{i}.png")
    audit = scan(data)
    told = {"layout": "flat", "val_split": 0.2, "seed": 0, "images": record_of(audit).to_dict()}
    update_card(pack, dataclasses.replace(card, data=told))
    return pack, data


def contents(paths: Any) -> set[str]:
    return {hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_what_calibrates_was_trained_on_and_what_judges_was_not(trained: tuple[Path, Path]) -> None:
    pack, data = trained
    audit, card = scan(data), read_card(pack)
    train, val = (contents(sample.path for sample in part) for part in (audit.train, audit.val))
    given = data_images(card, data)
    assert given is not None and contents(given.judging.paths) == val
    calibrating, judging = given.calibration
    assert (contents(calibrating.paths), contents(judging.paths)) == (train, val)
    for split, wanted in (("train", train), ("val", val), ("all", train | val)):
        one = data_images(card, data, split)  # type: ignore[arg-type]
        assert one is not None and contents(one.judging.paths) == wanted
        halves = [contents(half.paths) for half in one.calibration]  # of one part, no image does both
        assert not halves[0] & halves[1] and halves[0] | halves[1] == wanted
    assert data_images(card, None) is None


def test_copies_of_what_calibrates_do_not_judge(trained: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    pack, data = trained
    fresh = tmp_path / "fresh"
    for i, path in enumerate(sorted(data.rglob("[0-3].png"))):
        target = fresh / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.open(path).rotate(180).save(target)
        if i % 4 == 1:
            shutil.copy(target, target.with_name("2copy.png"))
    given = data_images(read_card(pack), fresh)
    assert given is not None
    calibrating, judging = given.calibration
    assert not contents(calibrating.paths) & contents(judging.paths) and judging.labels is not None
    assert [judging.labels[i] for i in range(len(judging.paths))] == [
        read_card(pack).classes.index(path.parent.name) for path in judging.paths
    ]
    assert "copies of calibration images" in capsys.readouterr().out


def test_what_cannot_be_used_is_named_and_not_counted(
    trained: tuple[Path, Path], fake_calm: Any, tmp_path: Path, capsys: Any
) -> None:
    pack, data = trained
    fake_calm()
    loose = tmp_path / "loose"
    for i, path in enumerate(sorted(data.rglob("[0-2].png"))):
        loose.mkdir(exist_ok=True)
        Image.open(path).rotate(180).save(loose / f"{i:02}.png")
    for i in (3, 4):  # one calibrates, one judges
        Image.new("L", (60000, 1)).save(loose / f"{i:02}.png")
    count = len(list(loose.iterdir()))
    for flags in (["--int8", "static"], ["--with-preproc"]):
        main(["export", "onnx", str(pack), "--out", str(tmp_path / "out"), "--data", str(loose), "--overwrite", *flags])
        told = capsys.readouterr()
        said = " ".join((told.out + told.err).split())
        assert "03.png: 1×60000 pixels" in said or "04.png: 1×60000 pixels" in said
        assert "an image cannot be used" not in said
        if flags[-1] == "static":
            assert f"calibrated on {count // 2 - 1} images" in said
    with pytest.raises(DataError, match=r"03\.png: 1×60000 pixels"):
        load_task(pack, base=fake_calm()).predict(loose / "03.png")


@pytest.mark.parametrize("flags", [("--int8", "static"), ("--dtype", "fp16"), ("--with-preproc",)], ids=lambda f: f[-1])
def test_the_gate_prints_the_accuracy_that_eval_prints(
    trained: tuple[Path, Path], fake_calm: Any, tmp_path: Path, capsys: Any, flags: tuple[str, ...]
) -> None:
    pack, data = trained
    fake_calm()
    assert main(["eval", str(pack), str(data), "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    main(["export", "onnx", str(pack), "--out", str(tmp_path / "out"), "--data", str(data), "--json", *flags])
    told = capsys.readouterr()
    said = " ".join((told.out + told.err).split())
    count = len(scan(data).val)
    assert (
        f"{count} images of {data}: those that the training run held out; left out: {50 - count} that it trained"
        in said
    )
    if flags[0] != "--with-preproc":
        assert f"on {count} held-out images of {data}: top-1 agreement with PyTorch" in said
        assert f"PyTorch fp32 {100 * evaluated['top1']:.2f} %" in said
    else:
        assert f"on {count} held-out images of {data}" in said
    if flags[-1] == "static":
        assert f"calibrated on {50 - count} training images of {data}" in said


def test_folders_of_several_sources(tmp_path: Path, capsys: Any) -> None:
    a, b = tmp_path / "a=b", tmp_path / "b"
    a.mkdir()
    assert folders_of([], ["x", "y"]) == {"x": None, "y": None}
    assert folders_of([f"x={b}"], ["x", "y"]) == {"x": b, "y": None}
    assert folders_of([f"x={b}", f"y={a}"], ["x", "y"]) == {"x": b, "y": a}
    assert folders_of([str(a)], ["x"]) == {"x": a}  # a folder may have = in its name
    assert capsys.readouterr().out == ""
    assert folders_of([str(b)], ["x", "y"]) == {"x": b, "y": b}
    assert "is used for 2 sources; NAME=FOLDER gives a source its own images" in " ".join(
        capsys.readouterr().out.split()
    )
    assert folders_of([str(b), f"y={a}"], ["x", "y"]) == {"x": b, "y": a}
    for texts, told in (
        ([f"z={b}"], "no source is called `z`; they are x, y"), ([f"x={b}", f"x={a}"], "gives `x` two folders"),
        ([str(a), str(b)], "two folders for all sources"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=told):
            folders_of(texts, ["x", "y"])
