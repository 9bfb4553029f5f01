"""``--compile``: the same training, packs with the same names, and one program for batches of any size."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from vtk.card import InputSpec
from vtk.errors import UnavailableError, UsageError
from vtk.models import compiler as compiling
from vtk.packs.load import load_task
from vtk.training.engine import compile_passes as compiled
from vtk.training.engine.fitting import fit
from vtk.training.engine.precision import Bf16, Fp32
from vtk.training.finetune import finetune
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.frozen_ffn.blocks import apply_memory_mode
from vtk.training.objectives.base import Batch, Classification
from vtk.training.policies import policy


class Fixed:
    """Batches of these sizes, others in every epoch."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def epoch(self, index):
        generator = torch.Generator().manual_seed(index)
        for n in self.sizes:
            yield Batch(torch.randn(n, 3, 16, 16, generator=generator), torch.arange(n) % 3)


@pytest.fixture
def programs(request, monkeypatch):
    """Compile without code generation, and without backward unless a case asks; return the images' shapes."""
    seen = []
    kind = getattr(request, "param", "eager")

    def backend(graph, inputs):
        seen.append(next(tuple(t.shape) for t in inputs if isinstance(t, torch.Tensor) and t.ndim == 4))
        return torch._dynamo.lookup_backend(kind)(graph, inputs)

    monkeypatch.setattr(compiled, "BACKEND", backend)
    return seen


def run(tiny, kind, *, mode=None, regime=Fp32, sizes=(4, 4, 3), compile, step_rule=None, **changes):
    """Train a model of one block; return its rows and its tensors."""
    model = tiny(depth=1, embed_dim=16, img_size=16, drop_path_rate=0.3)
    policy.apply(model, policy.select(model, kind))
    if mode is not None:
        apply_memory_mode(model, mode)
    precision = regime()
    config = FinetuneConfig(**{"epochs": 2, "lr": 1e-2, "compile": compile, **changes})
    done = fit(model, Classification(3), [Fixed(*sizes)], config, precision, step_rule=step_rule, show_progress=False)
    assert "forward" not in model.__dict__
    return [row["loss"] for row in done.rows], precision.master_state_dict(model)


CASES = {
    "attn minimal bf16": ("attn", {"mode": "minimal", "regime": Bf16, "ema": 0.9, "accumulate": 2}),
    "full checkpointing": ("full", {"grad_checkpointing": True}),
    "attn act8": ("attn", {"mode": "act8"}),
    "attn recompute bf16": ("attn", {"mode": "recompute", "regime": Bf16}),
    "attn plain": ("attn", {"mode": "plain"}),
    "attn+norm": ("attn+norm", {}),
    "ffn bf16": ("ffn", {"regime": Bf16}),
    "head": ("head", {"optimizer": "sgd"}),
}
LONG = list(CASES)[1:]


@pytest.mark.parametrize("programs", ["aot_eager"], indirect=True, ids=[""])
@pytest.mark.parametrize("case", [*list(CASES)[:1], *(pytest.param(c, marks=pytest.mark.slow) for c in LONG)])
def test_the_training_is_the_same_and_one_program_takes_every_batch(tiny, programs, case):
    kind, changes = CASES[case]
    torch._dynamo.utils.counters.clear()
    rows, tensors = run(tiny, kind, compile=True, **changes)
    assert len(programs) == 1 and not torch._dynamo.utils.counters["graph_break"]
    plain, wanted = run(tiny, kind, compile=False, **changes)
    assert rows == plain and len(programs) == 1
    assert tensors.keys() == wanted.keys() and all(torch.equal(tensors[n], wanted[n]) for n in wanted)


@pytest.mark.slow
def test_batches_of_one_are_a_program_of_their_own_and_equal_ones_have_fixed_shapes(tiny, programs):
    run(tiny, "attn", sizes=(4, 1, 3), epochs=3, compile=True)
    assert [shape[0] for shape in programs if shape[0] == 1] == [1] and len(programs) == 2
    del programs[:]
    run(tiny, "attn", sizes=(4, 4), compile=True)
    assert programs == [(4, 3, 16, 16)] and type(programs[0][0]) is int


def test_a_run_leaves_what_an_uncompiled_one_does_and_goes_on(config, programs, tmp_path, capsys):
    small = {"model_kwargs": ("depth=1", "embed_dim=16", "num_heads=2"), "img_size": 16, "batch_size": 14, "ema": 0.9}
    plain = finetune(config(out=tmp_path / "plain", **small))
    finetune(config(out=tmp_path / "run", compile=True, stop_after=1, **small))
    assert "--compile: 1 program compiled, 1 in all" in capsys.readouterr().out
    assert not any("_orig_mod" in name for name in load_file(tmp_path / "run/last/model.safetensors"))
    done = finetune(config(out=tmp_path / "run", compile=True, resume=True, **small))
    for name in ("task/task.safetensors", "task-last/task.safetensors"):
        assert (plain.out / name).read_bytes() == (done.out / name).read_bytes(), name
    assert done.rows[-1]["val_loss"] == plain.rows[-1]["val_loss"] and done.metrics.loss == plain.metrics.loss
    with pytest.raises(UsageError, match=r"--compile False \(was True\)"):
        finetune(config(out=tmp_path / "run", resume=True, **small))


def test_a_run_from_before_the_flag_goes_on(config, tmp_path):
    small = {"model_kwargs": ("depth=1", "embed_dim=16", "num_heads=2"), "img_size": 16, "batch_size": 36}
    finetune(config(stop_after=1, **small))
    path = tmp_path / "run/last/state.json"
    state = json.loads(path.read_text())
    assert state["flags"].pop("compile") is False
    path.write_text(json.dumps(state))
    assert len(finetune(config(resume=True, **small)).rows) == 2


def test_without_a_compiler_it_is_refused_before_data_is_read(config, monkeypatch, tmp_path):
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    with pytest.raises(UnavailableError, match=r"`--compile` needs a C\+\+ compiler .* or leave it out"):
        finetune(config(compile=True, data=tmp_path / "nowhere"))
    assert not (tmp_path / "run").exists()


def test_a_compiler_that_fails_is_one_line_and_the_model_is_as_it_was(tiny, monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no space for objects\nand more")

    monkeypatch.setattr(compiled, "BACKEND", broken)
    model = tiny(depth=1, img_size=16)
    forward = model.forward
    with pytest.raises(UnavailableError, match=r"torch.compile failed here \(.*no space for objects\); leave it out$"):
        run(lambda **_: model, "head", compile=True)
    assert model.forward == forward and "forward" not in model.__dict__


def test_errors_of_the_model_stay_what_they_are(tiny, programs):
    class Fails(Classification):
        def loss(self, model, batch):
            raise ZeroDivisionError("mine")

    model = tiny(depth=1)
    with pytest.raises(ZeroDivisionError, match="mine"):
        fit(model, Fails(3), [Fixed(2)], FinetuneConfig(compile=True), Fp32(), show_progress=False)
    assert "forward" not in model.__dict__


def test_breaks_of_the_graph_are_told(programs, capsys):
    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3 * 16 * 16, 3)

        def forward(self, images):
            mean = images.mean().item()
            return self.head(images.flatten(1)) + (1.0 if mean > 100 else 0.0)

    model = Breaks()
    steps = compiled.CompiledForward(model, [(2,)], checkpointing=False)
    with steps.training(show=True):
        found = model(torch.ones(2, 3, 16, 16))
    said = capsys.readouterr()
    assert "1 break" in said.err and "Breaks is compiled in pieces" in said.err, said
    torch.testing.assert_close(found, model(torch.ones(2, 3, 16, 16)))


def test_tasks_of_one_run_are_refused(config, photos):
    with pytest.raises(UsageError, match="`--compile` is for runs of one task"):
        config(compile=True, data=None, tasks=(f"a={photos}", f"b={photos}"))


@pytest.mark.slow
def test_inductor_trains_alike(config, tmp_path):
    changes = {"model_kwargs": ("depth=1", "embed_dim=32", "num_heads=2"), "drop_path": 0.2, "batch_size": 10}
    plain, done = (finetune(config(out=tmp_path / str(on), compile=on, **changes)) for on in (False, True))
    for mine, theirs in zip(done.rows, plain.rows, strict=True):
        for key in ("loss", "val_loss"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-4), key
    mine, theirs = (load_file(run.task_last / "task.safetensors") for run in (done, plain))
    assert mine.keys() == theirs.keys() and all(torch.allclose(mine[n], theirs[n], atol=1e-3) for n in mine)
    load_task(done.task)


@pytest.mark.slow
def test_lora_and_multi_label_compile(config, programs, tmp_path):
    pytest.importorskip("peft")
    for name, changes in {"lora": {"train": "lora", "lora_dropout": 0.1}, "labels": {"multi_label": True}}.items():
        torch._dynamo.utils.counters.clear()
        done, plain = (
            finetune(config(out=tmp_path / f"{name} {on}", compile=on, epochs=1, **changes)) for on in (True, False)
        )
        assert not torch._dynamo.utils.counters["graph_break"]
        mine, theirs = (load_file(run.task_last / "task.safetensors") for run in (done, plain))
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in theirs), name


SCRIPT = """
import sys
from vtk.__main__ import main
from vtk.training.engine import compile_passes as compiled
compiled.BACKEND = "aot_eager"
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--train", "full", "--grad-checkpointing")], ids=["attn", "checkpointing"])
def test_two_processes_do_what_one_does(config, photos, tmp_path, vtk_home, flags):
    (tmp_path / "run.py").write_text(SCRIPT)
    torchrun = shutil.which("torchrun") or str(Path(sys.executable).with_name("torchrun"))
    argv = (
        f"--model vit_tiny_patch16_224 --model-kwargs depth=1,embed_dim=32,num_heads=2 --no-pretrained --img-size 32 "
        f"--epochs 2 --batch-size 8 --lr 2e-3 --head-lr-mult 1 --workers 0 --device cpu --out {tmp_path / 'two'}"
    ).split()
    start = [torchrun, "--standalone", "--nproc_per_node", "2", str(tmp_path / "run.py"), "finetune", str(photos)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*start, "--compile", *argv, *flags], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "compiled" in done.stdout
    small = ("depth=1", "embed_dim=32", "num_heads=2")
    one = finetune(config(train="full" if flags else "attn", grad_checkpointing=bool(flags), model_kwargs=small))
    mine, theirs = (load_file(path / "task-last/task.safetensors") for path in (one.out, tmp_path / "two"))
    assert mine.keys() == theirs.keys() and all(torch.allclose(mine[n], theirs[n], atol=2e-4) for n in mine)


@pytest.mark.slow
def test_sharpness_aware_and_adversarial_steps_compile(tiny, programs):
    """Weights and pixels climb in a pass of their own: the same numbers, and no further program in later epochs."""
    from vtk.training.step_rules.adversarial import Adversary
    from vtk.training.step_rules.sam import Ascent

    rule = Ascent(0.05, adversary=Adversary(2.0, [InputSpec(16, 16)]))
    rows, tensors = run(tiny, "attn", compile=True, epochs=3, step_rule=rule)
    made = len(programs)
    plain, wanted = run(tiny, "attn", compile=False, epochs=3, step_rule=rule)
    assert rows == plain and all(torch.equal(tensors[n], wanted[n]) for n in wanted)
    assert 1 <= made <= 3
