"""What ``vtk eval --corrupted`` does with odd folders and files: every one is used, or named and counted."""

import dataclasses
import json
import pickle

import numpy as np
import pytest

import vtk
from tests.vtk.runtime._cifar import NAMES, logits, pictures, save_classes, save_model
from vtk.__main__ import main
from vtk.data.loading.array_images import open_images, read_labels
from vtk.data.sources.corruption_sets import STANDARD, find_corruptions, passed_over
from vtk.errors import DataError, UsageError
from vtk.evaluation.config import EvalConfig
from vtk.evaluation.corruption_error import read_baseline
from vtk.evaluation.metrics import evaluate


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "model.safetensors")


def refused(function, match, error=DataError):
    with pytest.raises(error, match=match) as info:
        function()
    assert "\n" not in str(info.value)


def corrupted(checkpoint, data, **options):
    return vtk.evaluate(checkpoint, EvalConfig(data=data, corrupted=True, workers=0, **options))


def test_every_folder_is_used_or_named(checkpoint, tmp_path, capsys):
    root = tmp_path / "c"
    for place in ("fog/1", "noise/shot_noise/1", "haze/1", "noise/rain/2"):
        save_classes(root / place, pictures(2), ["cat", "dog"])
    for place in ("haze/extra", "noise/rain/notes", "mist/1", "blur/6/cat", ".trash/1/cat"):
        (root / place).mkdir(parents=True)
    result = corrupted(checkpoint, root)
    assert list(result.scores) == ["shot_noise", "fog"]  # one of them in an archive's folder
    told = capsys.readouterr().err
    assert "left out: haze is no corruption, it has extra beside its severities" in told
    assert "left out: noise/rain is no corruption, it has notes beside its severities" in told
    assert "left out: mist is no corruption, severity 1 has no class folders" in told
    assert "left out: blur is no corruption, it has no severities, folders 1 to 5" in told
    assert told.count("left out") == 4  # nothing hidden


def test_hidden_arrays_are_none_and_folders_beside_arrays_are_named(tmp_path):
    np.save(tmp_path / "fog.npy", pictures(5))
    np.save(tmp_path / "labels.npy", np.arange(5))
    (tmp_path / "._fog.npy").write_bytes(b"as macOS leaves it")
    (tmp_path / "snow" / "1" / "cat").mkdir(parents=True)
    found = find_corruptions(tmp_path)
    assert [each.name for each in found] == ["fog"]
    assert passed_over(tmp_path, found) == [("snow", "a folder beside the arrays")]


def test_a_file_that_cannot_be_read_is_skipped_and_counted(checkpoint, tmp_path, capsys):
    names = ["cat", "dog", "frog", "ship"]
    images = pictures(4)
    save_classes(tmp_path / "fog" / "1", images, names)
    (tmp_path / "fog" / "1" / "dog" / "01.png").write_bytes(b"no image")
    out = tmp_path / "out"
    words = ["eval", str(checkpoint), str(tmp_path), "--corrupted", "--workers", "0", "--out", str(out), "--json"]
    said = logits(checkpoint, images).argmax(1)
    right = [NAMES[said[i]] == names[i] for i in (0, 2, 3)]
    assert main(words) == 0
    shown, told = capsys.readouterr()
    found = json.loads(shown)
    assert found["corruptions"]["fog"]["1"]["count"] == 3
    assert found["corruptions"]["fog"]["1"]["top1"] == pytest.approx(np.mean(right))
    (bad,) = found["skipped"]
    assert bad["path"].endswith("dog/01.png") and "not an image" in bad["reason"]
    assert "3 images, eager on torch cpu, fp32" in told and "unreadable and skipped: 1" in told
    for name in names:
        for file in (tmp_path / "fog" / "1" / name).iterdir():
            file.write_bytes(b"")
    refused(lambda: corrupted(checkpoint, tmp_path), "none of the 4 images can be read, such as .*: the file is empty")


def test_an_array_that_does_not_fit_stops_before_anything_is_evaluated(checkpoint, tmp_path, capsys, monkeypatch):
    for name in ("gaussian_noise", "fog"):
        np.save(tmp_path / f"{name}.npy", pictures(20))
    np.save(tmp_path / "labels.npy", np.arange(20) % 10)
    np.save(tmp_path / "jpeg_compression.npy", pictures(20)[:, :, :, 0])  # the last one, without colours
    monkeypatch.setattr("vtk.runtime.corruptions.evaluate", lambda *args, **more: pytest.fail("evaluated"))
    refused(lambda: corrupted(checkpoint, tmp_path), r"jpeg_compression.npy is uint8 \(20, 32, 32\); images are")


def test_a_loss_that_is_not_finite_is_null(checkpoint, tmp_path, monkeypatch):
    save_classes(tmp_path / "c" / "fog" / "1", pictures(2), ["cat", "dog"])
    monkeypatch.setattr(  # logits that overflow in a narrow type
        "vtk.runtime.corruptions.evaluate",
        lambda *args, **more: dataclasses.replace(evaluate(*args, **more), loss=float("nan")),
    )
    corrupted(checkpoint, tmp_path / "c", out=tmp_path / "out")
    assert json.loads((tmp_path / "out" / "corruptions.json").read_text())["corruptions"]["fog"]["1"]["loss"] is None
    assert (tmp_path / "out" / "corruptions.csv").read_text().endswith(",\n")


def test_a_baseline_is_of_the_same_choice_and_the_same_images(checkpoint, tmp_path, capsys):
    save_classes(tmp_path / "c" / "fog" / "1", pictures(6), ["cat", "dog", "frog"] * 2)
    corrupted(checkpoint, tmp_path / "c", out=tmp_path / "free")
    corrupted(checkpoint, tmp_path / "c", out=tmp_path / "among", restrict=True)
    free, among = (str(tmp_path / name / "corruptions.json") for name in ("free", "among"))
    refused(
        lambda: corrupted(checkpoint, tmp_path / "c", restrict=True, baseline=free),
        "chose among all classes, unlike this model; evaluate both with --restrict", UsageError,
    )  # fmt: skip
    refused(lambda: corrupted(checkpoint, tmp_path / "c", baseline=among), "among the 3 classes of", UsageError)
    capsys.readouterr()
    assert corrupted(checkpoint, tmp_path / "c", restrict=True, baseline=among).relative == pytest.approx({"fog": 1})
    assert "other images" not in capsys.readouterr().err
    save_classes(tmp_path / "less" / "fog" / "1", pictures(3), ["cat", "dog", "frog"])
    corrupted(checkpoint, tmp_path / "less", baseline=free)
    assert "is of other images: 6 of fog at severity 1, here 3" in capsys.readouterr().err


def test_a_threshold_for_all_classes_is_none_for_a_choice_among_fewer(tmp_path):
    refused(
        lambda: EvalConfig(data=tmp_path, restrict=True, threshold="auto"),
        "`--threshold auto` is chosen for answers among all classes", UsageError,
    )  # fmt: skip


def test_a_baseline_without_errors_gives_no_ratio(tmp_path):
    perfect = {"corruptions": {name: {level: {"top1": 1.0} for level in "12345"} for name in STANDARD}}
    (tmp_path / "p.json").write_text(json.dumps(perfect))
    found = read_baseline(str(tmp_path / "p.json"))
    assert found.relative("fog", dict.fromkeys("12345", 0.5)) is None and found.images == {}
    (tmp_path / "p.json").write_text(json.dumps({**perfect, "restricted": "all"}))
    refused(lambda: read_baseline(str(tmp_path / "p.json")), "is no corruptions.json")


@pytest.mark.parametrize("reader", [read_labels, open_images])
def test_nothing_is_unpickled_and_what_is_no_array_is_one_line(reader, tmp_path):
    np.save(tmp_path / "objects.npy", np.array([{}] * 3), allow_pickle=True)
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps([1, 2]))
    np.savez(tmp_path / "archive.npz", a=np.arange(3))
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    np.save(tmp_path / "whole.npy", pictures(5))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "whole.npy").read_bytes()[:-9])
    (tmp_path / "empty.npy").write_bytes(b"")
    for name in ("objects", "pickle", "archive", "cut", "empty"):
        with pytest.raises(DataError, match=f"{name}.npy is not a whole .npy file") as info:
            reader(tmp_path / f"{name}.npy")
        assert "\n" not in str(info.value) and "allow_pickle" not in str(info.value)
    (tmp_path / "folder.npy").mkdir()
    refused(lambda: reader(tmp_path / "folder.npy"), "is a folder; a file of this kind is an array of")


def test_arrays_of_any_order_give_the_same_images(tmp_path):
    images = pictures(5)
    np.save(tmp_path / "c.npy", images)
    np.save(tmp_path / "f.npy", np.asfortranarray(images))
    assert (open_images(tmp_path / "f.npy")[3] == open_images(tmp_path / "c.npy")[3]).all()
    np.save(tmp_path / "l.npy", np.arange(5).astype(">i2"))
    assert read_labels(tmp_path / "l.npy").tolist() == [0, 1, 2, 3, 4]
    for labels, said in (
        (np.array([-3, 1]), "has the label -3"), (np.array([2**63 + 5], np.uint64), "the label 9223372036854775813"),
        (np.arange(4.0), "no row of class numbers"), (np.zeros((4, 1), int), "no row of class numbers"),
        (np.zeros(0, int), "no row of class numbers"),
    ):  # fmt: skip
        np.save(tmp_path / "l.npy", labels)
        refused(lambda: read_labels(tmp_path / "l.npy"), said)
