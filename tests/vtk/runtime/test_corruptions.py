"""``vtk eval --restrict`` and ``--corrupted``, against logits and errors computed by hand from the same files."""

import csv
import dataclasses
import json
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

import vtk
from tests.vtk.runtime._cifar import NAMES, logits, pictures, save_classes, save_model
from vtk.__main__ import main
from vtk.card import InputSpec
from vtk.data.loading.array_images import ArrayImages, open_images, read_labels
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.sources.cifar_names import CIFAR_10, CIFAR_100, class_numbers
from vtk.data.sources.corruption_sets import STANDARD, CorruptionSet, find_corruptions
from vtk.errors import DataError, UsageError
from vtk.evaluation.config import EvalConfig
from vtk.evaluation.corruption_error import ALEXNET, Baseline, read_baseline, summarize
from vtk.formats import save_tensors
from vtk.packs.load import card_metadata, load_checkpoint
from vtk.runtime.corruptions import _baseline


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "model.safetensors")


def test_a_restricted_model_chooses_among_the_classes_of_the_folder(checkpoint, tmp_path):
    images, kept = pictures(24), ("cat", "frog", "truck")
    names = [kept[i % 3] for i in range(24)]
    save_classes(tmp_path / "a", images, names)
    raw = logits(checkpoint, images)
    columns = [NAMES.index(name) for name in kept]
    true = np.array([kept.index(name) for name in names])
    wanted = float(np.mean(raw[:, columns].argmax(1) == true))
    free = float(np.mean(raw.argmax(1) == np.array([NAMES.index(name) for name in names])))
    assert wanted != free
    shifted = raw[:, columns] - raw[:, columns].max(1, keepdims=True)
    loss = float(np.mean(np.log(np.exp(shifted).sum(1)) - shifted[np.arange(24), true]))
    result = vtk.evaluate(checkpoint, EvalConfig(data=tmp_path / "a", restrict=True, workers=0))
    assert (result.metrics.top1, result.restricted) == (wanted, 3)
    assert result.metrics.loss == pytest.approx(loss, rel=1e-5) and result.to_dict()["restricted"] == 3
    plain = vtk.evaluate(checkpoint, EvalConfig(data=tmp_path / "a", workers=0))
    assert plain.metrics.top1 == free and "restricted" not in plain.to_dict()


def test_a_restricted_reference_chooses_among_the_same_classes(checkpoint, tmp_path):
    save_classes(tmp_path / "a", pictures(12), ["cat", "dog"] * 6)
    config = EvalConfig(data=tmp_path / "a", restrict=True, workers=0, reference=str(checkpoint), batch_size=5)
    assert vtk.evaluate(checkpoint, config).agreement == 1.0


@pytest.fixture
def cifar_c(checkpoint, tmp_path):
    """Two corruptions of four images, as CIFAR-10-C is published; three are recognised in the fog of severity 1."""
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    for seed, name in enumerate(("fog", "gaussian_noise")):
        np.save(folder / f"{name}.npy", pictures(20, seed))
    said = [CIFAR_10.split().index(NAMES[i]) for i in logits(checkpoint, pictures(4, 0)).argmax(1)]
    labels = np.array([*said[:3], (said[3] + 1) % 10])
    np.save(folder / "labels.npy", np.tile(labels, 5).astype(np.int64))
    return folder


def by_hand(checkpoint, folder):
    """Return corruption → severity → accuracy, from the arrays and the model alone."""
    numbers, found = np.load(folder / "labels.npy"), {}
    for path in folder.glob("[!l]*.npy"):
        right = logits(checkpoint, np.load(path)).argmax(1) == [NAMES.index(CIFAR_10.split()[n]) for n in numbers]
        found[path.stem] = {str(s + 1): float(right[4 * s : 4 * s + 4].mean()) for s in range(5)}
    return found


def test_cifar_c_is_scored_by_severity_and_its_labels_are_cifars_numbers(checkpoint, cifar_c, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["eval", str(checkpoint), str(cifar_c), "--corrupted", "--workers", "0", "--out", str(out), "--json"]
    assert main(words) == 0
    shown = json.loads(capsys.readouterr().out)
    wanted = by_hand(checkpoint, cifar_c)
    assert wanted["fog"]["1"] == 0.75 and len({*wanted["fog"].values()}) > 1
    assert list(shown["corruptions"]) == ["gaussian_noise", "fog"]  # the order of the mCE
    assert {n: {s: one["top1"] for s, one in of.items()} for n, of in shown["corruptions"].items()} == wanted
    assert shown["mean_top1"] == pytest.approx(np.mean([list(of.values()) for of in wanted.values()]))
    assert (shown["baseline"], shown["mce"], shown["standard_top1"]) == (None, None, None)
    assert json.loads((out / "corruptions.json").read_text()) == shown
    rows = list(csv.DictReader((out / "corruptions.csv").open()))
    assert len(rows) == 10 and float(rows[0]["top1"]) == wanted["gaussian_noise"]["1"] and rows[0]["images"] == "4"
    assert main([*words, "--overwrite"]) == 0
    np.save(cifar_c / "labels.npy", np.load(cifar_c / "labels.npy")[:4])  # one label for all severities
    capsys.readouterr()
    assert main([*words[:-3], "--baseline", str(out), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {*again["ce"]} == {name for name, of in wanted.items() if sum(of.values()) < 5}
    assert again["corruptions"] == shown["corruptions"] and again["baseline"] == again["source"]
    assert all(value == pytest.approx(1) for value in again["ce"].values()) and again["mce"] is None


@pytest.mark.parametrize("group", ["", "noise"])
def test_imagenet_c_is_folders_of_corruption_severity_and_class(checkpoint, tmp_path, group):
    images, names = pictures(6), ["cat", "dog", "frog"] * 2
    raw = logits(checkpoint, images)
    right = raw.argmax(1) == [NAMES.index(name) for name in names]
    root = tmp_path / "c"
    for name, part in (("shot_noise", slice(0, 3)), ("custom", slice(3, 6))):
        save_classes(root / group / name / "2", images[part], names[part])
    (root / "noise" / "notes.txt").parent.mkdir(parents=True, exist_ok=True)
    result = vtk.evaluate(checkpoint, EvalConfig(data=root, corrupted=True, workers=0))
    found = {name: {level: one.top1 for level, one in of.items()} for name, of in result.scores.items()}
    assert found == {"shot_noise": {"2": np.mean(right[:3])}, "custom": {"2": np.mean(right[3:])}}
    among = vtk.evaluate(checkpoint, EvalConfig(data=root, corrupted=True, workers=0, restrict=True))
    columns = [NAMES.index(name) for name in names[:3]]
    assert among.restricted == 3
    assert among.scores["custom"]["2"].top1 == np.mean(raw[3:][:, columns].argmax(1) == [0, 1, 2])


def test_the_mean_corruption_error_is_the_published_formula():
    rng = np.random.default_rng(0)
    errors = {name: {str(s): float(e) for s, e in zip(range(1, 6), rng.random(5), strict=True)} for name in STANDARD}
    wanted = np.mean([np.mean([*errors[name].values()]) / ALEXNET[name] for name in STANDARD])
    found = summarize(errors, read_baseline("alexnet"))
    assert found.mce == pytest.approx(wanted, rel=1e-12) and len(ALEXNET) == 15
    assert summarize(ALEXNET_AS_ERRORS, read_baseline("alexnet")).mce == pytest.approx(1, rel=1e-12)
    more = {**errors, "speckle_noise": dict.fromkeys("12345", 1.0)}  # counts for the mean over all alone
    assert summarize(more, read_baseline("alexnet")).mce == pytest.approx(wanted, rel=1e-12)
    assert summarize(more, None).mean_top1 < summarize(more, None).standard_top1 == found.standard_top1
    lacking = {**errors, "fog": {"1": 0.5}}
    assert summarize(lacking, read_baseline("alexnet")).mce is None
    theirs = {name: dict.fromkeys("12345", 0.5) for name in STANDARD}
    own = summarize(errors, Baseline("b", errors=theirs))
    assert own.relative["fog"] == pytest.approx(sum(errors["fog"].values()) / 2.5)
    assert own.mce == pytest.approx(np.mean([sum(of.values()) / 2.5 for of in errors.values()]))


def test_alexnets_errors_are_no_baseline_of_an_easier_choice(tmp_path):
    sets = [CorruptionSet("fog", tmp_path / "fog", ("1",))]
    plain, easier = (EvalConfig(data=tmp_path, corrupted=True, restrict=restrict) for restrict in (False, True))
    assert _baseline(plain, 1000, sets).name == "alexnet" and _baseline(easier, 1000, sets) is None
    with pytest.raises(UsageError, match="`--baseline` alexnet chose among all 1,000 classes, and --restrict") as info:
        _baseline(dataclasses.replace(easier, baseline="alexnet"), 1000, sets)
    assert "\n" not in str(info.value)


ALEXNET_AS_ERRORS = {name: dict.fromkeys("12345", error) for name, error in ALEXNET.items()}


def test_labels_are_of_cifars_classes_by_name_or_by_number():
    assert class_numbers(NAMES) == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert class_numbers(["plane", "car", *CIFAR_10.split()[2:]]) == list(range(10))
    assert class_numbers([str(i) for i in range(10)]) == list(range(10))
    hundred = [name.replace("_", " ").title() for name in CIFAR_100.split()]
    assert class_numbers(sorted(hundred, reverse=True)) == list(range(100))[::-1]
    for classes in (("a", "b"), [f"class{i}" for i in range(10)]):
        with pytest.raises(DataError, match="CIFAR-10") as info:
            class_numbers(classes)
        assert "\n" not in str(info.value)


def test_what_is_no_corrupted_set_is_one_line(checkpoint, cifar_c, tmp_path):
    def refused(data, match, error=DataError, **options):
        with pytest.raises(error, match=match) as info:
            vtk.evaluate(checkpoint, EvalConfig(data=data, corrupted=True, workers=0, **options))
        assert "\n" not in str(info.value)

    save_classes(tmp_path / "plain", pictures(2), ["cat", "dog"])
    refused(tmp_path / "plain", "has cat, dog, and no corruptions; expected CORRUPTION/SEVERITY/CLASS")
    refused(tmp_path / "absent", "is no folder; expected")
    refused(cifar_c, "is of ImageNet-C's 1,000 classes, the model has 10", UsageError, baseline="alexnet")
    refused(cifar_c, "no corruptions.json of", baseline=str(_written(tmp_path / "x.json", "{}")))
    np.save(cifar_c / "fog.npy", pictures(19))
    refused(cifar_c, "has 19 images and labels.npy 20 labels")
    np.save(cifar_c / "fog.npy", np.zeros((20, 32, 32, 3)))
    refused(cifar_c, "is float64 .* images are uint8")
    np.save(cifar_c / "labels.npy", np.full(20, 10))
    refused(cifar_c, "has the label 10; the model has 10 classes")
    np.save(cifar_c / "labels.npy", np.array([{}] * 20), allow_pickle=True)
    refused(cifar_c, "is not a whole .npy file")
    for options in ({"baseline": "alexnet"}, {"corrupted": True, "split": "train"},
                    {"corrupted": True, "reference": "x"}, {"corrupted": True, "threshold": "auto"}):  # fmt: skip
        with pytest.raises(UsageError) as info:
            EvalConfig(data=tmp_path, **options)
        assert "\n" not in str(info.value)


def _written(path, text):
    path.write_text(text)
    return path


def test_arrays_stay_on_disk_and_a_corruption_is_there_once(cifar_c, tmp_path):
    assert isinstance(open_images(cifar_c / "fog.npy"), np.memmap)
    images = ArrayImages(cifar_c / "fog.npy", 4, [1, 2], eval_transform(InputSpec(32, 32)))
    first = images[0]
    copy = pickle.loads(pickle.dumps(images))  # as worker processes get it: the path, not the pixels
    assert torch.equal(copy[0][0], first[0]) and len(pickle.dumps(images)) < 8 * 32 * 32 and first[1] == 1
    assert torch.equal(first[0], eval_transform(InputSpec(32, 32))(Image.fromarray(np.load(images.path)[4])))
    assert read_labels(cifar_c / "labels.npy").dtype == np.int64
    for group in ("a", "b"):
        save_classes(tmp_path / "twice" / group / "fog" / "1", pictures(1), ["cat"])
    with pytest.raises(DataError, match="has the corruption fog twice"):
        find_corruptions(tmp_path / "twice")


def test_corruptions_in_their_own_folder_and_in_one_of_an_archive_are_all_found(tmp_path):
    for folder in ("fog", "noise/shot_noise", "noise/gaussian_noise"):
        save_classes(tmp_path / folder / "1", pictures(1), ["cat"])
    save_classes(tmp_path / "fog" / "2" / "1", pictures(1), ["1"])  # a class and a folder in it that are called 1
    assert [each.name for each in find_corruptions(tmp_path)] == ["gaussian_noise", "shot_noise", "fog"]


def test_a_multi_label_model_is_refused(checkpoint, tmp_path):
    task = load_checkpoint(checkpoint)
    path = tmp_path / "many.safetensors"
    save_tensors(path, task.model.state_dict(), card_metadata(dataclasses.replace(task.card, multi_label=True)))
    save_classes(tmp_path / "a", pictures(2), ["cat", "dog"])
    save_classes(tmp_path / "c" / "fog" / "1", pictures(2), ["cat", "dog"])
    for data, options in ((tmp_path / "a", {"restrict": True}), (tmp_path / "c", {"corrupted": True})):
        with pytest.raises(UsageError, match="one label per image"):
            vtk.evaluate(path, EvalConfig(data=data, workers=0, **options))
