"""A bank with kernels and a budget: factors and whole packs page in and out, hot tasks are merged."""

from typing import Any

import pytest


@pytest.fixture(scope="module")
def mixed(make_lab: Any) -> Any:
    lab = make_lab(init_values=0.5)
    packs = {
        "a": lab.factors("a", ranks=(2, 1, 3), seed=1),
        "b": lab.factors("b", ranks=(4, 0), classes=7, size=48, seed=2),
        "codes": lab.factors("codes", ranks=(3,), seed=4, dtype="int8"),
        "c": lab.factors("c", ranks=(5, 2), seed=5),
        "some": lab.factors("some", ranks=(1,), seed=6, whole=("blocks.0.attn.proj", "pos_embed")),
        "whole": lab.pack("whole", classes=4, seed=8),
    }
    return lab, packs, {name: lab.alone(path) for name, path in packs.items()}


@pytest.mark.parametrize("share", [1.3, 0.9, 0.85])
def test_answers_stay_right_and_memory_within_its_bound(mixed: Any, tools: Any, share: float) -> None:
    lab, packs, models = mixed
    most = int(lab.bank(packs, kernels=True).memory().device_bytes * share)
    bank, names, merged = lab.bank(packs, kernels=True, max_bytes=most), list(packs), set()
    for i in range(18):
        pair = dict.fromkeys((names[i % 6], names[(i * 5 + 1) % 6]), 1) if i < 12 else {"a": 1, "c": 2}
        images = tools.random_batch(bank, pair, i)
        assert tools.worst_error(bank, images, models) <= 1e-12
        memory = bank.memory()
        assert memory.device_bytes <= most
        merged |= {name for name, task in memory.tasks.items() if task.merged_bytes}
    assert not {"some", "whole"} & merged
    assert share < 1 or {"a", "c"} <= merged, "called most, and there was room"


def test_a_task_whose_matrices_are_partly_whole_is_merged_and_others_are_not(mixed: Any) -> None:
    lab, packs, _ = mixed
    bank = lab.bank(packs, kernels=True)
    tasks = bank.memory().tasks
    assert {name for name, task in tasks.items() if task.factors} == {"a", "b", "codes", "c"}
    assert tasks["a"].bytes < tasks["whole"].bytes / 2 < tasks["some"].bytes


def test_an_unfolded_bank_runs_the_same_tasks(mixed: Any, tools: Any) -> None:
    lab, packs, models = mixed
    bank = lab.bank(packs, kernels=True, fused=False)
    counts = {name: 1 + i % 2 for i, name in enumerate(packs)}
    assert tools.worst_error(bank, tools.random_batch(bank, counts), models) <= 1e-12
