"""``vtk finetune --pack-rank``: a compressed copy of the best pack at the end of a run."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vtk.errors import UsageError
from vtk.packs.cards import pack_bytes, read_card
from vtk.packs.load import load_task
from vtk.training.finetune import finetune
from vtk.training.finetune_config import FinetuneConfig

Config = Callable[..., FinetuneConfig]


def test_a_run_writes_the_best_pack_again_as_factors_of_its_own_images(config: Config) -> None:
    run = finetune(config(epochs=1, pack_rank=2))
    small = read_card(run.out / "task-small")
    facts = small.pack["compression"]
    assert (small.schema, facts["rank"], small.pack["dtype"]) == (2, 2, "bf16")
    assert facts["judged"]["images"] == 15 and facts["weighed"]["images"] == 36
    assert facts["judged"]["before"] == read_card(run.task).metrics["top1"]
    assert facts["judged"]["after"] == small.metrics["top1"]
    assert pack_bytes(run.out / "task-small") < pack_bytes(run.task)
    assert load_task(run.out / "task-small").factors.keys() == small.pack["factors"].keys()
    assert "factors" not in read_card(run.task).pack  # the exact pack is what it would have been
    shutil.rmtree(run.out / "task-small")
    finetune(config(epochs=1, pack_rank=1, resume=True))  # of a complete run
    assert read_card(run.out / "task-small").pack["compression"]["rank"] == 1


@pytest.mark.slow
def test_what_is_trained_on_replaces_it_and_a_run_without_it_removes_it(config: Config) -> None:
    run = finetune(config(epochs=2, stop_after=1, pack_rank=1))
    finetune(config(epochs=2, resume=True))
    assert not (run.out / "task-small").exists() and (run.out / "task").is_dir()


@pytest.mark.slow
def test_a_rank_that_cannot_be_chosen_leaves_the_run_complete(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vtk.packs.compression.candidates.LEAST_LIKENESS", 1.1)
    run = finetune(config(epochs=1, pack_rank="auto"))
    assert "was not written: `--rank auto`: no pack is within 0.50 points" in " ".join(capsys.readouterr().err.split())
    assert not (run.out / "task-small").exists() and (run.out / "task-last").is_dir()


@pytest.mark.parametrize("train", ["lora", "head"])
def test_runs_without_whole_changes_of_matrices_refuse_it(train: str, config: Config, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"`--pack-rank` 4: .*--train {train}"):
        config(train=train, pack_rank=4)
