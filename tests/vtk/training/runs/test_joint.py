"""A run of several tasks: each pack is that of a run of its own, and all share what is frozen."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from vtk.bank import TaskBank
from vtk.errors import BaseError, DataError, UsageError
from vtk.packs.load import load_task
from vtk.training.engine.fitting import DivergedError
from vtk.training.engine.processes import Ranks
from vtk.training.finetune import finetune, finetune_tasks, memory_report
from vtk.training.runs.joint_tasks import build_tasks

SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A file with a base of 32 px."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0, **SMALL)
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    save_file(model.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def shades(tmp_path_factory):
    """Two classes that differ in brightness: 7 training and 4 held-out images each."""
    root = tmp_path_factory.mktemp("shades")
    rng = np.random.default_rng(1)
    for part, count in (("train", 7), ("val", 4)):
        for label, name in enumerate(("dark", "light")):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 120, (20, 20, 3)) + 130 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    return root


@pytest.fixture
def both(config, photos, shades, weights):
    """Build the config of a run of two tasks, the second at 48 px."""

    def build(**changes):
        tasks = (f"colour={photos}", f"shade={shades}@48")
        return config(**{"data": None, "tasks": tasks, "pretrained": True, "weights": weights, **changes})

    return build


def alone(both, name, photos, shades, out, **changes):
    """The same task in a run of its own."""
    own = {"colour": {"data": photos}, "shade": {"data": shades, "img_size": 48}}[name]
    return finetune(dataclasses.replace(both(**changes), tasks=(), out=out, **own))


@pytest.mark.parametrize("changes", [
    {"mixup": 0.8, "cutmix": 1.0, "auto_augment": "rand-m5", "accumulate": 2},
    {"memory": "recompute", "cb": True, "cb_layers": ("all",), "precision": "bf16"},
    {"memory": "recompute", "cb": True, "cb_layers": ("all",)},
    pytest.param({"train": "head"}, marks=pytest.mark.slow),
], ids=["mixed and accumulated", "recompute, broadcast, bf16", "recompute, broadcast", "head"])  # fmt: skip
def test_packs_are_those_of_runs_of_their_own(both, photos, shades, tmp_path, changes, monkeypatch):
    # whole runs in fp64: the same batches, losses and updates, up to the order in which rows are summed
    if "precision" not in changes:
        import vtk.training.runs.pack_writer as packs
        import vtk.training.runs.prepare as prepare
        import vtk.training.runs.task as task

        create, augment = task.build_model, task.augmentation

        def wide(*args, **kwargs):
            created = create(*args, **kwargs)
            created.model.double()
            return created

        def wide_augmentation(*args):
            narrow = augment(*args)
            return lambda image: narrow(image).double()

        monkeypatch.setattr(task, "build_model", wide)
        monkeypatch.setattr(task, "augmentation", wide_augmentation)
        monkeypatch.setattr(prepare, "evaluate_ranks", in_fp64(prepare.evaluate_ranks))
        monkeypatch.setattr(packs, "save_task", keep_fp64)
    result = finetune_tasks(both(out=tmp_path / "both", **changes))
    for name in ("colour", "shade"):
        own = alone(both, name, photos, shades, tmp_path / name, **changes)
        exact = own
        if "precision" in changes:  # both runs may be as far from each other as each is from fp32
            exact = alone(both, name, photos, shades, tmp_path / f"{name}32", **{**changes, "precision": "fp32"})
        together = result.tasks[name]
        for folder in ("task", "task-last"):
            a = load_file(together.out / folder / "task.safetensors")
            b = load_file(own.out / folder / "task.safetensors")
            assert a.keys() == b.keys() and ("precision" in changes or {t.dtype for t in a.values()} == {torch.float64})
            worst = max((a[k].double() - b[k].double()).abs().max().item() for k in a)
            c = load_file(exact.out / folder / "task.safetensors")
            rounding = max((b[k].double() - c[k].double()).abs().max().item() for k in b)
            assert worst <= max(1e-12, 2 * rounding), (folder, worst, rounding)
        assert together.metrics.top1 == own.metrics.top1 and together.best_epoch == own.best_epoch
        for mine, theirs in zip(together.rows, own.rows, strict=True):
            tolerance = 1e-9 if "precision" not in changes else 1e-2
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=max(1e-6, tolerance))
            assert mine["lr"] == theirs["lr"]


def in_fp64(evaluate):
    def run(model, loader, classes, ranks, *, show_progress, score):
        class Wide(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = model

            def forward(self, images):
                return self.inner(images.double())

        return evaluate(Wide(), loader, classes, ranks, show_progress=show_progress, score=score)

    return run


def keep_fp64(path, *, state, created, card, trained, dtype, factors=None):
    """Keep trained tensors unrounded, for comparing; a real pack is fp32."""
    path.mkdir(parents=True, exist_ok=True)
    save_file({k: state[k].contiguous() for k in trained}, path / "task.safetensors")
    (path / "task.json").write_text(card.to_json())
    return card


def test_packs_share_their_base_and_a_bank_holds_them_together(both, vtk_home):
    result = finetune_tasks(both())
    packs = {name: found.task for name, found in result.tasks.items()}
    tasks = {name: load_task(pack) for name, pack in packs.items()}
    bank = TaskBank()
    for name, pack in packs.items():
        bank.add(name, pack)
    images = {"colour": torch.randn(2, 3, 32, 32), "shade": torch.randn(3, 3, 48, 48)}
    for name, logits in bank(images).items():
        expected = tasks[name].model(images[name])
        assert torch.allclose(logits, expected, atol=1e-5), name
    states = [task.model.state_dict() for task in tasks.values()]
    frozen = [k for k in states[0] if ".mlp." in k or ".norm" in k or k.startswith("patch_embed")]
    assert frozen and all(torch.equal(states[0][k], states[1][k]) for k in frozen)
    card = json.loads((packs["shade"] / "task.json").read_text())
    assert "--task colour=" in card["command"] and card["input"]["height"] == 48
    told = json.loads(json.dumps(result.to_dict()))
    assert told["tasks"]["shade"]["top1"] == result.tasks["shade"].metrics.top1


def test_a_stopped_run_goes_on_as_if_it_had_not_been(both, tmp_path):
    changes = {"epochs": 2, "precision": "bf16", "drop_path": 0.2, "mixup": 0.8, "sampling": 2.0}
    whole = finetune_tasks(both(out=tmp_path / "whole", **changes))
    finetune_tasks(both(out=tmp_path / "parts", stop_after=1, **changes))
    parts = finetune_tasks(both(out=tmp_path / "parts", resume=True, **changes))
    for name in ("colour", "shade"):
        for folder in ("task", "task-last"):
            files = [r.tasks[name].out / folder / "task.safetensors" for r in (whole, parts)]
            assert files[0].read_bytes() == files[1].read_bytes(), (name, folder)
        drop = ("seconds", "images_per_second")
        rows = [[{k: v for k, v in row.items() if k not in drop} for row in r.tasks[name].rows] for r in (whole, parts)]
        assert rows[0] == rows[1] and len(rows[0]) == 2
    with pytest.raises(UsageError, match="--sampling 1"):
        finetune_tasks(both(out=tmp_path / "parts", resume=True, **{**changes, "sampling": 1.0}))
    with pytest.raises(UsageError, match=r"--tasks .*64x64"):
        tasks = (both().tasks[0], both().tasks[1].replace("@48", "@64"))
        finetune_tasks(both(out=tmp_path / "parts", resume=True, tasks=tasks, **changes))


def test_a_run_that_replaces_another_does_not_go_on_from_its_state(both, tmp_path, monkeypatch):
    out = tmp_path / "run"
    finetune_tasks(both(epochs=1, out=out))

    def stop(*_, **__):
        raise KeyboardInterrupt  # before the first epoch is done

    with monkeypatch.context() as patch:
        patch.setattr("vtk.training.runs.run.fit", stop)
        with pytest.raises(KeyboardInterrupt):
            finetune_tasks(both(epochs=1, out=out, overwrite=True))
    assert not (out / "colour" / "task").exists()
    with pytest.raises(DataError, match="holds no state of a run"):
        finetune_tasks(both(epochs=1, out=out, resume=True))


def test_a_run_whose_best_pack_is_gone_does_not_go_on(both, config, tmp_path):
    finetune_tasks(both(epochs=2, stop_after=1, out=tmp_path / "both"))
    finetune(config(epochs=2, stop_after=1, out=tmp_path / "one"))
    for task in (tmp_path / "both" / "shade" / "task", tmp_path / "one" / "task"):
        task.rename(task.with_name("moved"))
    for run, changed in ((finetune_tasks, both(out=tmp_path / "both")), (finetune, config(out=tmp_path / "one"))):
        with pytest.raises(DataError, match="task, the best so far, is gone; put it back"):
            run(dataclasses.replace(changed, epochs=2, resume=True))


def test_an_edited_state_is_refused(both, tmp_path):
    finetune_tasks(both(epochs=2, stop_after=1, out=tmp_path / "run"))
    last = tmp_path / "run" / "last"
    info, state = json.loads((last / "state.json").read_text()), torch.load(last / "state.pt", weights_only=True)
    tensors = load_file(last / "model.safetensors")

    def refused(match):
        with pytest.raises(DataError, match=match):
            finetune_tasks(both(epochs=2, resume=True, out=tmp_path / "run"))

    save_file({k: v for k, v in tensors.items() if k != "shade/head.bias"}, last / "model.safetensors")
    refused("no tensor `head.bias`")
    torch.save({**state, "optimizer": {"colour": state["optimizer"]["colour"]}}, last / "state.pt")
    refused(r"state of task `shade` is damaged \(KeyError")
    del info["best"]["tasks"]["colour"]["top1"]
    (last / "state.json").write_text(json.dumps(info))
    refused("state of task `colour` is damaged .*top1")


def test_a_task_with_fewer_images_than_processes_is_refused(both, tmp_path):
    many = Ranks(torch.device("cpu"), world=15)
    with pytest.raises(UsageError, match="task `shade` has 14 training images for 15 processes"):
        build_tasks(both(batch_size=15), tmp_path / "run", many)


def test_a_task_at_another_size_starts_from_the_first(both, photos, tmp_path, config, weights):
    first = finetune_tasks(both(epochs=4, out=tmp_path / "first")).tasks["colour"]
    tasks = (f"colour={photos}@48", f"again={photos}")
    starts = (f"colour={first.task}",)
    second = finetune_tasks(both(tasks=tasks, init_from=starts, epochs=1, lr=1e-6, out=tmp_path / "second"))
    anew = second.tasks["again"].metrics
    assert second.tasks["colour"].metrics.top1 >= first.metrics.top1 - 0.2 > anew.top1 - 0.2
    packed = load_file(second.tasks["colour"].task / "task.safetensors")
    start = load_file(first.task / "task.safetensors")
    assert torch.allclose(packed["blocks.1.attn.qkv.weight"], start["blocks.1.attn.qkv.weight"], atol=1e-4)
    assert packed["pos_embed"].shape[1] == 10 and start["pos_embed"].shape[1] == 5
    from timm.layers import resample_abs_pos_embed

    table = resample_abs_pos_embed(start["pos_embed"], [3, 3], num_prefix_tokens=1)
    assert torch.allclose(packed["pos_embed"], table, atol=1e-4)
    own = config(weights=weights, pretrained=True, img_size=48, init_from=(str(first.task),), epochs=1, lr=1e-6)
    one = finetune(dataclasses.replace(own, out=tmp_path / "one"))
    a, b = (load_file(r / "task.safetensors") for r in (one.task, second.tasks["colour"].task))
    assert all(torch.allclose(a[k], b[k], atol=1e-6) for k in a)


def test_starts_that_do_not_fit(both, config, photos, tmp_path, weights):
    pack = finetune(config(weights=weights, pretrained=True, epochs=1, out=tmp_path / "first")).task
    same = {"weights": weights, "pretrained": True, "epochs": 1, "init_from": (str(pack),)}
    with pytest.raises(UsageError, match=r"changed `pos_embed`, which this run leaves as the base has it"):
        finetune(config(**same, train="head", out=tmp_path / "a"))
    with pytest.raises(UsageError, match=r"is a vit_tiny_patch16_224 .*depth.*, not vit_tiny_patch16_224"):
        finetune(config(**{**same, "weights": None, "pretrained": False},
                        model_kwargs=("depth=3", "embed_dim=32", "num_heads=2"), out=tmp_path / "b"))  # fmt: skip
    with pytest.raises(UsageError, match="made with other --branches, --cb"):
        finetune(config(**same, cb=True, out=tmp_path / "c"))
    with pytest.raises((UsageError, BaseError), match="base"):
        finetune(config(**{**same, "weights": None, "pretrained": False}, seed=1, out=tmp_path / "d"))
    with pytest.raises(DataError, match="there is no folder"):
        finetune(config(**{**same, "init_from": (str(tmp_path / "none"),)}, out=tmp_path / "e"))


def test_a_diverged_task_is_named(both, monkeypatch):
    from vtk.training.objectives.base import Classification

    monkeypatch.setattr(Classification, "criterion", criterion_of_two(Classification.criterion))
    with pytest.raises(
        DivergedError, match="the loss of task shade or its gradients are not finite in all steps of epoch 1"
    ):
        finetune_tasks(both())


def criterion_of_two(plain):
    def run(self, logits, batch):
        loss = plain(self, logits, batch)
        return loss * float("nan") if logits.shape[1] == 2 else loss

    return run


def test_memory_counts_what_is_shared_once(both, config, photos, shades, weights):
    report = memory_report(both(dry_run=True, memory="plain"))
    assert {f.mode for f in report.counted} == {"plain", "act8", "recompute", "minimal"}
    one, two = (
        memory_report(config(data=data, weights=weights, pretrained=True, img_size=size, dry_run=True, memory="plain"))
        for data, size in ((photos, 32), (shades, 48))
    )
    for all_, a, b in zip(report.counted, one.counted, two.counted, strict=True):
        assert all_.image == a.image + b.image and all_.optimizer == a.optimizer + b.optimizer
        trained = b.gradients // 4
        assert all_.weights == a.weights + 4 * trained  # the second adds its own tensors only
    assert report.to_dict()["batch_size"] == 8


def test_refusals(config, photos, shades, tmp_path):
    tasks = (f"a={photos}", f"b={shades}")
    for changes, match in (
        ({"data": photos}, "give one folder, or tasks, not both"),
        ({"tasks": tasks[:1]}, "is alone"),
        ({"train": "full"}, "`--train` full: tasks of one run share"),
        ({"cb_scale": True}, "`--cb-scale` trains"),
        ({"grad_checkpointing": True}, "use --memory minimal"),
        ({"init_from": ("c=x",)}, "NAME being one of a, b"),
        ({"sampling": 0.5}, "`--sampling` is 0.5; allowed is at least 1"),
    ):
        with pytest.raises(UsageError, match=match):
            config(**{"data": None, "tasks": tasks, **changes})
    with pytest.raises(UsageError, match="give --task"):
        config(sampling=2.0)
    with pytest.raises(UsageError, match="call finetune_tasks"):
        finetune(config(data=None, tasks=tasks))
    with pytest.raises(UsageError, match="no tasks"):
        finetune_tasks(config())
    out = tmp_path / "refused"
    with pytest.raises(UsageError, match=r"task `a`: `--img-size`: height 33 is not a multiple"):
        finetune_tasks(config(data=None, tasks=(f"a={photos}@33", tasks[1]), out=out))
    with pytest.raises(DataError, match="does not exist"):
        finetune_tasks(config(data=None, tasks=(tasks[0], f"b={tmp_path / 'nowhere'}"), out=out))
    assert not out.exists()
    out = tmp_path / "used"
    (out / "a").mkdir(parents=True)
    (out / "a" / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match="not empty"):
        finetune_tasks(config(data=None, tasks=tasks, out=out))
    assert (out / "a" / "thesis.txt").read_text() == "mine"


@pytest.mark.slow
def test_two_processes_train_tasks_as_one(both, tmp_path, vtk_home):
    """torchrun and gloo on the CPU: the packs are those of one process up to rounding."""
    torchrun = shutil.which("torchrun") or str(Path(sys.executable).with_name("torchrun"))
    config = both()
    flags = [
        "--model", "vit_tiny_patch16_224", "--model-kwargs", "depth=2,embed_dim=32,num_heads=2",
        "--weights", str(config.weights), "--img-size", "32", "--epochs", "2", "--batch-size", "8", "--lr", "2e-3",
        "--head-lr-mult", "1", "--workers", "0", "--device", "cpu", "--accumulate", "2", "--sampling", "1.5",
        *(word for task in config.tasks for word in ("--task", task)),
    ]  # fmt: skip
    run = [torchrun, "--standalone", "--nproc_per_node", "2", "-m", "vtk", "finetune", *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*run, "--out", str(tmp_path / "two")], env=env, capture_output=True, text=True, timeout=300,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    one = finetune_tasks(both(accumulate=2, sampling=1.5, out=tmp_path / "one"))
    for name in ("colour", "shade"):
        a, b = (load_file(tmp_path / n / name / "task-last" / "task.safetensors") for n in ("one", "two"))
        assert a.keys() == b.keys() and all(torch.allclose(a[k], b[k], atol=1e-4) for k in a), name
        rows = [json.loads(line) for line in (tmp_path / "two" / name / "metrics.jsonl").read_text().splitlines()]
        for mine, theirs in zip(one.tasks[name].rows, rows, strict=True):
            for key in ("loss", "val_loss", "val_top1", "lr"):
                assert theirs[key] == pytest.approx(mine[key], rel=1e-4), key
