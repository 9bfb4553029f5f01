"""A table of labels in place of a folder: the same run, the same numbers, in every command that reads images."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vtk.__main__ import main
from vtk.card import Card
from vtk.data import scan
from vtk.packs.cards import read_card
from vtk.packs.load import load_task
from vtk.runtime.images import choose_images
from vtk.training.finetune import finetune, finetune_tasks
from vtk.training.finetune_config import FinetuneConfig


def lines(photos: Path, separator: str = ",") -> str:
    audit = scan(photos, show_progress=False)
    named = [(s, "train") for s in audit.train] + [(s, "val") for s in audit.val]
    rows = [(audit.classes[s.label], part, str(s.path)) for s, part in named]
    return "\n".join(separator.join(row) for row in [("class", "split", "image"), *rows])


@pytest.fixture
def table(photos: Path, tmp_path: Path) -> Path:
    (tmp_path / "pets.csv").write_text(lines(photos))
    return tmp_path / "pets.csv"


def test_a_run_on_a_table_is_that_on_the_folder(
    config: Callable[..., FinetuneConfig], table: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finetune(config(epochs=1))
    named = finetune(config(epochs=1, data=table, out=tmp_path / "table"))
    packs = [load_task(result.task).model.state_dict() for result in (folder, named)]
    assert packs[0].keys() == packs[1].keys() and all(torch.equal(packs[0][key], packs[1][key]) for key in packs[0])
    card = read_card(named.task)
    assert card.classes == ("blue", "green", "red") and card.metrics == read_card(folder.task).metrics
    capsys.readouterr()
    answers = []
    for run, data in ((folder, photos), (named, table), (named, photos), (folder, table)):
        assert main(["eval", str(run.task), str(data), "--json", "--workers", "0"]) == 0
        told = json.loads(capsys.readouterr().out)
        answers.append((told["count"], told["top1"], round(told["loss"], 5)))
    assert len(set(answers)) == 1 and answers[0][0] == 15
    chosen = choose_images(card, table, "val")
    assert len(chosen.paths) == 15 and chosen.labels == tuple(i // 5 for i in range(15))


def test_separators_that_were_given_are_those_of_eval(
    config: Callable[..., FinetuneConfig], photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / "odd.csv"
    odd.write_text(lines(photos, "#"))
    result = finetune(config(epochs=1, data=odd, field_separator="#"))
    assert read_card(result.task).data["field_separator"] == "#"
    assert main(["eval", str(result.task), str(odd), "--workers", "0"]) == 0
    several = tmp_path / "several.csv"
    several.write_text(
        "path,labels\n"
        + "".join(f"{path},{'a' if i % 2 else 'a+b'}\n" for i, path in enumerate(sorted(photos.glob("*/*/*.png"))))
    )
    result = finetune(config(epochs=1, data=several, multi_label=True, label_separator="+", out=tmp_path / "several"))
    card: Card = read_card(result.task)
    assert card.classes == ("a", "b") and card.data["label_separator"] == "+"
    assert main(["eval", str(result.task), str(several), "--workers", "0"]) == 0


def test_tables_are_tasks_of_a_run_and_train_whole_models(
    config: Callable[..., FinetuneConfig], table: Path, photos: Path, tmp_path: Path
) -> None:
    both = finetune_tasks(
        config(epochs=1, data=None, tasks=(f"named={table}", f"folder={photos}"), out=tmp_path / "both")
    )
    cards = [read_card(both.tasks[name].task) for name in ("named", "folder")]
    assert cards[0].classes == cards[1].classes and cards[0].metrics["count"] == cards[1].metrics["count"] == 15
    argv = ["train", str(table), "--model", "vit_tiny_patch16_224", "--model-kwargs", "depth=1", "embed_dim=32"]
    argv += ["num_heads=2", "--img-size", "32", "--epochs", "1", "--workers", "0", "--device", "cpu"]
    assert main([*argv, "--out", str(tmp_path / "whole")]) == 0
    shutil.rmtree(tmp_path / "whole")
    table.write_text(table.read_text().replace("class,split,image", "kind,of,what"))
    assert main([*argv, "--out", str(tmp_path / "whole")]) == 3
