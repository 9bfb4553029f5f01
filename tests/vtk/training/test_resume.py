"""Runs that stop after any epoch and go on: with every kind of state that a run can have, to the last bit."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.vtk._faults import tree
from vtk.card import InputSpec
from vtk.data.audit.result import DataAudit, Sample
from vtk.data.loading.loader import ImageDataset
from vtk.data.loading.train_pipeline import train_transform
from vtk.errors import UsageError
from vtk.training.engine.result import FitState
from vtk.training.finetune import finetune, finetune_tasks
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.runs import resume_state as checkpoint
from vtk.training.runs.identity import check_identity, run_identity

LEVIT = {
    "model": "levit_128s",
    "model_kwargs": ("embed_dim=[16,24,32]", "num_heads=[2,2,2]", "depth=[1,1,1]", "key_dim=8"),
}
KINDS = {
    "statistics of BatchNorm": LEVIT,
    "averaged weights": {"ema": 0.9, "reprob": 0.3},
    "sgd, all weights": {"optimizer": "sgd", "lr": 0.05, "train": "full", "cutmix": 1.0, "mix_prob": 0.7},
    "factors of LoRA": {"train": "lora", "lora_dropout": 0.2},
    "factors of CB": {"cb_scale": True, "accumulate": 2},
    "int8 packs": {"pack_dtype": "int8"},
}


def same_runs(one, two):
    for folder in ("task", "task-last", "last", "adapter"):
        a, b = ({k: v for k, v in tree(out / folder).items() if not k.endswith("state.json")} for out in (one, two))
        assert a.keys() == b.keys()
        wrong = [name for name in a if a[name] != b[name] and name != "state.pt"]
        assert not wrong, (folder, wrong)
    states = [torch.load(out / "last" / "state.pt", weights_only=True) for out in (one, two)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "changes",
    [pytest.param(v, id=k, marks=pytest.mark.slow if i else ()) for i, (k, v) in enumerate(KINDS.items())],
)
def test_one_and_one_and_one_epoch_equal_three(config, tmp_path, changes):
    # of four: a run that is complete has no state to compare
    changes = {"epochs": 4, "batch_size": 12, "mixup": 0.4, "drop_path": 0.1, **changes}
    whole = finetune(config(out=tmp_path / "whole", stop_after=3, **changes))
    for i in range(3):
        parts = finetune(config(out=tmp_path / "parts", stop_after=1, resume=i > 0, **changes))
        assert len(parts.rows) == i + 1
    same_runs(tmp_path / "whole", tmp_path / "parts")
    times = ("seconds", "images_per_second")
    rows = [[{k: v for k, v in row.items() if k not in times} for row in run.rows] for run in (whole, parts)]
    assert rows[0] == rows[1]
    assert (whole.metrics.top1, whole.metrics.loss, whole.best_epoch) == (
        parts.metrics.top1, parts.metrics.loss, parts.best_epoch,
    )  # fmt: skip


def test_a_state_is_on_the_cpu_and_holds_only_what_training_changes(config):
    result = finetune(config(epochs=2, stop_after=1, **LEVIT))
    last = result.out / "last"
    names = set(json.loads((result.out / "census.json").read_text())["names"])
    tensors = load_file(last / "model.safetensors")
    assert names < tensors.keys()
    assert all("running_" in n or "num_batches" in n for n in tensors.keys() - names)
    state = torch.load(last / "state.pt", weights_only=True)  # without a map: where it says, it goes
    moments = [t for s in state["optimizer"]["state"].values() for t in s.values() if isinstance(t, torch.Tensor)]
    assert moments and {t.device.type for t in moments} == {"cpu"}


def test_a_state_of_strided_and_shared_tensors_is_whole(tmp_path):
    """safetensors has no strides, and refuses two tensors of one memory."""
    torch.manual_seed(0)
    large = torch.randn(6, 4, 5, 5)
    tensors = {
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "rows": large[1:3], "columns": large[:, ::2], "turned": large[0, 0].t(), "all": large, "again": large,
        "one": large[0, 0, 0, 0], "none": large[:0],
    }  # fmt: skip
    fit = FitState(1, {}, {}, [{"epoch": 1.0}])
    best = {"epoch": 1, "count": 1, "loss": 0.5, "top1": 1.0, "top5": 1.0}
    saved = checkpoint.Saved(
        tensors, fit, {**best, "confusion": large}, {"flags": {"epochs": 2}, "base": "b", "data": "d", "processes": 1}
    )
    checkpoint.save_state(tmp_path / "last", saved)
    found = checkpoint.load_state(tmp_path / "last").tensors
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].is_contiguous() and torch.equal(found[name], tensor), name
    used = sum(t.numel() for t in tensors.values()) * 4
    assert used < (tmp_path / "last" / "model.safetensors").stat().st_size < used + 2000  # slices, not all they lie in


NOTHING = DataAudit(Path("x"), "flat", (), (), ())


def _free(config):
    known = run_identity(config, base_id="b", audit=NOTHING, precision="fp32", world=1)["flags"]
    return [f.name for f in dataclasses.fields(config) if f.name not in known]


def test_each_flag_that_changes_the_result_is_refused_by_its_name():
    config = FinetuneConfig(data="x")
    now = run_identity(config, base_id="b", audit=NOTHING, precision="fp32", world=1)
    assert len(now["flags"]) > 40
    for name, value in now["flags"].items():
        before = {**now, "flags": {**now["flags"], name: "something else"}}
        if name == "memory":  # all modes but one give the same gradients
            before["flags"][name] = "act8"
        with pytest.raises(UsageError) as caught:
            check_identity(before, now, FinetuneConfig)
        flag = f"--{name.replace('_', '-')} {value} (was {before['flags'][name]})"
        assert flag in str(caught.value) and "\n" not in str(caught.value)
    assert {"resume", "overwrite", "out", "workers", "device"} <= set(_free(config))


def test_a_run_of_several_tasks_goes_on_only_with_the_same_tasks(config, photos, tmp_path):
    flags = {"data": None, "out": tmp_path / "run", "epochs": 2}
    finetune_tasks(config(tasks=(f"a={photos}", f"b={photos}"), stop_after=1, **flags))
    before = tree(tmp_path / "run")
    for tasks in ((f"a={photos}", f"c={photos}"), (f"b={photos}", f"a={photos}"), (f"a={photos}", f"b={photos}@48")):
        with pytest.raises(UsageError, match=r"--tasks .*was \['a@32x32', 'b@32x32'\]"):
            finetune_tasks(config(tasks=tasks, resume=True, **flags))
        assert tree(tmp_path / "run") == before
    with pytest.raises(UsageError, match=r"continues with the run's own flags, but these differ: .*--tasks"):
        finetune(config(resume=True, out=tmp_path / "run", epochs=2))
    assert tree(tmp_path / "run") == before


def test_what_an_image_looks_like_follows_from_seed_epoch_and_image(photos):
    file = sorted((photos / "train").rglob("*.png"))[0]
    augment = train_transform(InputSpec(16, 16), auto_augment="rand-m9-mstd0.5", color_jitter=0.3, reprob=0.5)
    one, again, other = (ImageDataset([Sample(file, 0)] * 2, augment, seed=seed) for seed in (1, 1, 2))
    first = one[(0, 0)][0]
    assert torch.equal(first, again[(0, 0)][0])
    for different in (one[(1, 0)], one[(0, 1)], other[(0, 0)]):
        assert not torch.equal(first, different[0])
