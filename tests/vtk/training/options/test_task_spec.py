"""Tasks as they are written on a command line, and how often each is drawn."""

from itertools import chain
from pathlib import Path

import pytest
import torch

from vtk.errors import UsageError
from vtk.training.engine.step_plan import Feed, plan_joint
from vtk.training.engine.streams import SampledStream, batch_counts
from vtk.training.objectives.base import Batch
from vtk.training.options.task_spec import TaskSpec, parse_starts, parse_tasks
from vtk.training.runs import outputs


def test_names_folders_and_sizes():
    texts = ("pets=data/pets", "cars=data/cars@384", "wide=a=b@x@224x448", "at=some@where", "x.1=/data@v2/c, d@32")
    assert parse_tasks(texts) == (
        TaskSpec("pets", Path("data/pets")),
        TaskSpec("cars", Path("data/cars"), 384),
        TaskSpec("wide", Path("a=b@x"), (224, 448)),
        TaskSpec("at", Path("some@where")),
        TaskSpec("x.1", Path("/data@v2/c, d"), 32),
    )


BAD = ["pets", "=data", "pets=", "..=data", "a/b=data", "last=data", "TASK=data", "a b=c", "ä=data", ".x=data",
       "-x=data", "a\n=data", "x.=data", "a" * 65 + "=data"]  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_texts_that_name_no_task(text):
    with pytest.raises(UsageError) as told:
        parse_tasks((text,))
    assert "\n" not in str(told.value)


def test_no_task_is_called_as_what_a_run_writes(tmp_path):
    names = [*outputs.ALL_FILES, *(folder.name for folder in outputs._folders(tmp_path))]
    assert {"last", "adapter.old", "metrics.csv", "backbone.safetensors"} <= set(names)
    for name in names:
        with pytest.raises(UsageError, match="cannot be a folder of the run"):
            parse_tasks((f"{name}=data",))


def test_a_name_is_given_once():
    with pytest.raises(UsageError, match="names `Pets` twice"):
        parse_tasks(("pets=a", "Pets=b"))


def test_starts():
    assert parse_starts(("runs/a=b/task",), ()) == {"": Path("runs/a=b/task")}
    assert parse_starts(("b=x=y", "a=z"), ("a", "b")) == {"b": Path("x=y"), "a": Path("z")}
    for texts, names, match in (
        (("x", "y"), (), "gives the run two packs"),
        (("a=x", "a=y"), ("a",), "gives task `a` two packs"),
        (("x",), ("a",), "give NAME=PACK"),
        (("a=",), ("a",), "names no pack"),
    ):
        with pytest.raises(UsageError, match=match):
            parse_starts(texts, names)


def test_steps_hold_each_batch_once_and_spread_a_short_stream():
    sizes = [[8] * 20 + [3], [5] * 4, [2]]
    plan = plan_joint(sizes, 1, seed=7)
    assert len(plan) == 21
    for stream, batches in enumerate(sizes):
        drawn = [(i, size) for i, step in enumerate(plan) for s, found in step if s == stream for size in found]
        assert [size for _, size in drawn] == batches
        for k, (i, _) in enumerate(drawn):  # one in each of equal stretches
            assert k * 21 // len(batches) <= i < (k + 1) * 21 // len(batches)
    assert all(list(step) == sorted(step) for step in plan)
    assert plan == plan_joint(sizes, 1, seed=7)
    assert any(plan != plan_joint(sizes, 1, seed=seed) for seed in range(8))


def test_steps_take_several_batches_of_a_stream():
    plan = plan_joint([[4, 4, 4, 4, 1], [2, 2]], 2, seed=0)
    assert [found for step in plan for s, found in step if s == 0] == [[4, 4], [4, 4], [1]]
    assert [found for step in plan for s, found in step if s == 1] == [[2, 2]]


def test_passes_of_a_step_hold_one_batch_of_each_stream_that_has_one_left():
    def batches(first, count):
        return iter([Batch(torch.full((1,), first + i), torch.zeros(1)) for i in range(count)])

    parts = [(0, batches(0.0, 3), 3), (2, batches(10.0, 3), 1)]
    feed = Feed(parts, lambda b: b, keep=False)
    found = [([(b.stream, b.images.item()) for b in part.batches], part.last) for part in feed]
    assert found == [([(0, 0.0), (2, 10.0)], False), ([(0, 1.0)], False), ([(0, 2.0)], True)]


class Numbers:
    """Passes over ten images in batches of four; an image is its pass and number."""

    sizes = (4, 4, 2)

    def epoch(self, index):
        for first, size in zip((0, 4, 8), self.sizes, strict=True):
            yield Batch(torch.tensor([100 * index + first + i for i in range(size)]), torch.zeros(size))


@pytest.mark.parametrize("batches", [1, 2, 5])
def test_epochs_of_a_given_number_of_batches(batches):
    stream = SampledStream(Numbers(), batches)
    assert list(stream.sizes) == [4] * batches
    epochs = [[b.images.tolist() for b in stream.epoch(i)] for i in range(3)]
    assert all([len(batch) for batch in epoch] == [4] * batches for epoch in epochs)
    passes = [{batch[0] // 100 for batch in epoch} for epoch in epochs]
    assert passes[0].isdisjoint(passes[1]) and passes[1].isdisjoint(passes[2])
    assert len(set(chain(*chain(*epochs)))) == 12 * batches  # no image twice in a pass
    assert epochs == [[b.images.tolist() for b in stream.epoch(i)] for i in range(3)]


def test_temperature():
    sizes = [[32] * 90, [32] * 10]
    assert batch_counts(sizes, 1.0) == [None, None]
    assert batch_counts(sizes, 2.0) == [75, 25]  # √90 : √10 is 3 : 1
    assert batch_counts(sizes, 1e9) == [50, 50]
    assert batch_counts([[32] * 1000, [1]], 1.01)[1] == 1
