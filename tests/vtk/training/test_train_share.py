"""``--train-share``: a stratified, seeded fraction of the training images; shares are nested, held-out images stay."""

import dataclasses
import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from vtk.__main__ import main
from vtk.data.audit.multilabel_scan import MultiAudit
from vtk.data.audit.result import DataAudit, Sample
from vtk.errors import UsageError
from vtk.packs.cards import read_card
from vtk.training.finetune import finetune
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.runs.train_share import keep_share
from vtk.training.train_config import TrainConfig


def audit(*counts):
    train = tuple(Sample(Path(f"train/{label}/{i}"), label) for label, n in enumerate(counts) for i in range(n))
    return DataAudit(Path(), "split", tuple(map(str, range(len(counts)))), train, (Sample(Path("val/0/0"), 0),))


def test_every_class_keeps_its_share_and_at_least_one_image():
    found = keep_share(audit(1000, 100, 14, 2, 0), 0.1, 0)
    assert Counter(sample.label for sample in found.train) == {0: 100, 1: 10, 2: 1, 3: 1}
    assert found.val == audit(1).val and found.train_share == 0.1
    assert "112 of 1116 training images are used (--train-share 0.1, stratified by class, seed 0)" in found.notes
    assert list(found.train) == [s for s in audit(1000, 100, 14, 2, 0).train if s in set(found.train)]  # their order


def test_a_share_contains_every_smaller_one_and_another_seed_takes_others():
    whole = audit(200, 50)
    by_share = {share: set(keep_share(whole, share, 3).train) for share in (0.02, 0.1, 0.25, 0.5, 0.9, 1.0)}
    shares = sorted(by_share)
    assert all(by_share[a] < by_share[b] for a, b in itertools.pairwise(shares))
    other = set(keep_share(whole, 0.5, 4).train)
    assert len(other) == 125 and 30 < len(other & by_share[0.5]) < 95  # 62.5 by chance, deviation 5.6


def test_the_choice_does_not_depend_on_the_order_of_the_files_or_on_the_folder(tmp_path):
    whole = audit(50, 30)
    turned = dataclasses.replace(whole, train=whole.train[::-1])
    below = tuple(Sample(tmp_path / sample.path, sample.label) for sample in whole.train)
    moved = dataclasses.replace(whole, root=tmp_path, train=below)
    names = [{"/".join(s.path.parts[-3:]) for s in keep_share(each, 0.3, 1).train} for each in (whole, turned, moved)]
    assert names[0] == names[1] == names[2] and len(names[0]) == 24


def test_images_with_several_labels_keep_the_share_of_each_label():
    rng = np.random.default_rng(0)
    labels = (rng.random((4000, 4)) < (0.5, 0.3, 0.1, 0.02)).astype(np.float32)
    train = tuple(Sample(Path(f"{i}"), row) for i, row in enumerate(labels))
    whole = MultiAudit(Path(), "split", tuple("abcd"), train, ())
    for seed in range(6):
        found = keep_share(whole, 0.1, seed)
        kept = np.sum([sample.label for sample in found.train], axis=0)
        assert len(found.train) == pytest.approx(400, abs=3)
        assert kept[3] == round(labels[:, 3].sum() * 0.1)  # the rarest label exactly: by chance it varies by ±2.7
        assert np.all(np.abs(kept - 0.1 * labels.sum(0)) < 4 * np.sqrt(0.1 * labels.sum(0)) + 1)
        assert 0 < sum(not sample.label.any() for sample in found.train) < len(found.train)  # those without, too


def test_a_run_trains_on_the_share_and_its_records_say_so(config):
    share = config(train_share=0.25, epochs=1, model_kwargs=("depth=1", "embed_dim=16", "num_heads=2"))
    result = finetune(share)
    card = read_card(result.task)
    kept = {line.split(",")[1] for line in (result.out / "images.csv").read_text().splitlines() if "train," in line}
    assert card.data["train_share"] == 0.25 and result.to_dict()["train_share"] == 0.25
    assert len(kept) == 9 and Counter(name.split("/")[1] for name in kept) == {"blue": 3, "green": 3, "red": 3}
    recorded = json.loads((result.out / "audit.json").read_text())
    assert (recorded["train"]["count"], recorded["train_share"], recorded["val"]["count"]) == (9, 0.25, 15)
    with pytest.raises(UsageError, match=r"--train-share 0\.5 \(was 0\.25\)"):
        finetune(dataclasses.replace(share, train_share=0.5, resume=True))


def test_a_run_on_all_images_records_no_share():
    assert TrainConfig(train_share=1).share == {} and keep_share(audit(3), 1.0, 0) == audit(3)


def test_pre_training_without_labels_takes_the_share_of_all_images(photos, tmp_path, capsys):
    words = ["pretrain", str(photos), "--method", "simmim", "--no-pretrained", "--img-size", "32", "--model-kwargs",
             "depth=1,embed_dim=16,num_heads=2", "--model", "vit_tiny_patch16_224", "--epochs", "1", "--workers", "0",
             "--train-share", "0.5", "--batch-size", "8", "--out", str(tmp_path / "run"), "--json"]  # fmt: skip
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["train_share"] == 0.5
    assert (tmp_path / "run" / "images.csv").read_text().count("train,") == 18
    assert read_card(tmp_path / "run" / "backbone.safetensors").data["train_share"] == 0.5


@pytest.mark.parametrize("kind", [TrainConfig, PretrainConfig])
@pytest.mark.parametrize("share", [0, -0.1, 1.1])
def test_a_share_outside_of_0_to_1_is_one_line(kind, share):
    with pytest.raises(UsageError, match=r"`--train-share` is") as info:
        kind(train_share=share)
    assert "\n" not in str(info.value)
