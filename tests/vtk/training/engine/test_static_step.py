"""The step that waits for nothing: the plain loop's numbers, and no look at the device inside it."""

import contextlib
import copy
import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.vtk.training.engine.test_fit import Fixed, Logged, attn_vit
from tests.vtk.training.engine.test_save_schedule import Death, Dies, numbers, same
from vtk.errors import UnavailableError, UsageError
from vtk.training.engine.fitting import DivergedError, fit
from vtk.training.engine.gradients import Means
from vtk.training.engine.learner import Learner
from vtk.training.engine.precision import Bf16, Fp32
from vtk.training.engine.processes import Ranks
from vtk.training.engine.static_step import make, rules
from vtk.training.engine.static_step.graph import CudaRecorder
from vtk.training.engine.static_step.step import StaticStep
from vtk.training.engine.static_step.update import DeviceUpdate
from vtk.training.finetune import finetune
from vtk.training.finetune_config import MODES, FinetuneConfig
from vtk.training.frozen_ffn import apply_memory_mode
from vtk.training.objectives.base import Batch, Classification

KWARGS = ("depth=1", "embed_dim=16", "num_heads=2")
CASES = {
    "clipped": {"clip_grad": 0.5},
    "not clipped": {"clip_grad": 0.0},
    "accumulated": {"accumulate": 2, "schedule": "linear", "min_lr": 0.1},
    "averaged": {"ema": 0.9, "layer_decay": 0.7},
    "sgd": {"optimizer": "sgd", "lr": 0.05},
    "momentum 0": {"optimizer": "momentum", "momentum": 0.0},
    "adam, amsgrad": {"optimizer": "adam", "opt_kwargs": ("amsgrad=yes",)},
    "few steps": {"max_steps": 7},
}


class Python:
    """A recorder that runs the recorded function again: what it reads and writes must lie where it lay."""

    def __init__(self, error=None):
        self.error, self.warmed, self.replays = error, 0, 0

    def warm(self, function):
        self.warmed += 1
        function()

    def record(self, function, spare):
        if self.error:
            raise self.error

        def replay():
            self.replays += 1
            function()

        return replay


@pytest.fixture
def static(monkeypatch):
    """Let a CPU take the static step, with this recorder."""

    def switch(recorder=None):
        monkeypatch.setattr(rules, "KINDS", ("cpu",))
        monkeypatch.setattr(make, "recorder_for", lambda device: recorder)

    return switch


def run(model, stream, objective=None, precision=None, **changes):
    start, live = changes.pop("start", None), changes.pop("live", [])
    config = FinetuneConfig(**{"epochs": 2, "lr": 1e-3, "head_lr_mult": 5.0, "smoothing": 0.1, **changes})
    states = []

    def keep(end):
        states.append(copy.deepcopy(end.state({})))
        live.append(copy.deepcopy(model.state_dict()))
        return {}

    result = fit(
        model, objective or Classification(3, smoothing=0.1), [stream], config, precision or Fp32(), start=start,
        show_progress=False, on_epoch=keep,
    )  # fmt: skip
    return result.rows, states


class Stream(Fixed):
    """In fp64, and with images that are not numbers in some batches of the first epoch."""

    def __init__(self, *sizes, broken=()):
        super().__init__(*sizes)
        self.broken = broken

    def epoch(self, index):
        for i, batch in enumerate(super().epoch(index)):
            images = batch.images.double()
            yield Batch(images * torch.nan if index == 0 and i in self.broken else images, batch.labels)


def close(found, expected, limit=1e-12):
    for name, tensor in expected.items():
        assert float((found[name].double() - tensor.double()).abs().max()) <= limit, name


@pytest.mark.parametrize(("name", "broken"), [("clipped", ()), ("averaged", ()), *((name, (0, 3)) for name in CASES)])
def test_equals_the_plain_loop(tiny, static, name, broken):
    plain, ours = (attn_vit(tiny, drop_path_rate=0.2).double() for _ in range(2))
    stream = Stream(*[5] * 5, 2, broken=broken)
    expected, before = run(plain, stream, **CASES[name])
    recorder = Python()
    static(recorder)
    found, after = run(ours, stream, **CASES[name])
    assert recorder.replays >= 1 and recorder.warmed == 3
    for a, b in zip(numbers(found), numbers(expected), strict=True):
        assert a == pytest.approx(b, rel=1e-12)
    close(ours.state_dict(), plain.state_dict())
    for a, b in zip(after, before, strict=True):  # what is saved is what the plain loop saves
        assert a.schedule.keys() == b.schedule.keys() and a.schedule["last_epoch"] == b.schedule["last_epoch"]
        for own, other in zip(a.optimizer["param_groups"], b.optimizer["param_groups"], strict=True):
            assert own == {**other, "lr": pytest.approx(other["lr"])}
        assert a.optimizer["state"].keys() == b.optimizer["state"].keys()
        for i, state in b.optimizer["state"].items():
            close(a.optimizer["state"][i], {k: v for k, v in state.items() if v is not None})
        if b.ema:
            assert a.ema["step"] == b.ema["step"]
            close(a.ema["averages"], b.ema["averages"])


@pytest.mark.parametrize("first", ["plain", "static"])
def test_goes_on_from_what_the_other_saved(tiny, static, monkeypatch, first):
    stream = Stream(4, 4, 4, 4, broken=(1,))
    whole, model = (attn_vit(tiny).double() for _ in range(2))
    run(whole, stream, ema=0.9)
    live, states = [], []
    for kind in (first, "static" if first == "plain" else "plain"):
        static(Python())
        if kind == "plain":
            monkeypatch.setattr(rules, "KINDS", ("cuda",))
        if live:
            model.load_state_dict(live[0])
        part = {"start": states[0]} if states else {"stop_after": 1}
        states = run(model, stream, ema=0.9, live=live, **part)[1]
    close(model.state_dict(), whole.state_dict())


def test_a_run_stopped_within_an_epoch_goes_on_to_the_last_bit(static, config, tmp_path):
    kind = {"ema": 0.9, "drop_path": 0.3, "mixup": 0.8, "accumulate": 2, "batch_size": 4, "model_kwargs": KWARGS}
    static(Python())
    whole = finetune(config(out=tmp_path / "whole", **kind))
    with pytest.raises(Death):
        finetune(config(save_every="1", **kind), callbacks=[Dies(2, 4)])
    state = torch.load(tmp_path / "run" / "last" / "state.pt", weights_only=True)
    for group in state["optimizer"]["param_groups"]:  # what a loop without a static step goes on from
        assert isinstance(group["lr"], float) and not group["fused"] and not group["capturable"]
    with pytest.raises(Death):
        finetune(config(save_every="1", resume=True, cuda_graph="off", **kind), callbacks=[Dies(2, 5)])
    state = torch.load(tmp_path / "run" / "last" / "state.pt", weights_only=True)
    assert not any(group["fused"] for group in state["optimizer"]["param_groups"])
    parts = finetune(config(save_every="1", resume=True, **kind))  # the card records the last command
    same(whole.out, parts.out)
    assert numbers(parts.rows) == numbers(whole.rows)


def test_statistics_of_a_batch_norm_and_what_an_objective_logs(tiny, static):
    models = []
    for _ in range(2):
        model = attn_vit(tiny)
        model.patch_embed.norm = torch.nn.BatchNorm1d(4)
        model.patch_embed.norm.requires_grad_(True)
        models.append(model.double())

    class Log(Logged):
        static = True

    stream = Stream(4, 4, 4, 4, 2, broken=(2,))
    expected, _ = run(models[0], stream, Log(3))
    static(Python())
    found, _ = run(models[1], stream, Log(3))
    assert [r["size"] for r in found] == pytest.approx([r["size"] for r in expected]) and found[1]["one"] == 1
    close(models[1].state_dict(), models[0].state_dict())


def test_ten_steps_in_a_row_without_finite_gradients_end_the_run(tiny, static):
    static()
    with pytest.raises(DivergedError, match=r"in 10 steps in a row, in epoch 1 .*lower --lr"):
        run(attn_vit(tiny).double(), Stream(*[2] * 12, broken=range(12)))


def test_the_count_of_steps_done_before_goes_to_the_device(tiny):
    """A plain optimiser counts on the CPU; a fused one wants its count where the weights are."""
    model = attn_vit(tiny)
    learner = Learner("", model, FinetuneConfig(), 20)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    learner.optimizer.step()
    DeviceUpdate(learner, torch.device("meta"))
    steps = [state["step"] for state in learner.optimizer.state.values()]
    assert steps and all(step.device.type == "meta" and step.dtype == torch.float32 for step in steps)


class Watch(TorchDispatchMode):
    """Notes operators whose result the host reads, or whose shape hangs on numbers."""

    def __init__(self):
        super().__init__()
        self.found, self.names = [], set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        self.names.add(function.name())
        if tags & set(function.tags) or any(word in function.name() for word in ("item", "nonzero", "is_same")):
            self.found.append(function.name())
        return function(*args, **(kwargs or {}))


def storages():
    gc.collect()
    held = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.layout == torch.strided:  # no fakes of others
            held[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
    return held


def static_step(model, precision=None, objective=None, **changes):
    config = FinetuneConfig(**{"lr": 1e-3, "epochs": 1, **changes})
    precision = precision or Fp32()
    precision.prepare(model, [n for n, p in model.named_parameters() if p.requires_grad])
    objective = objective or Classification(3, smoothing=0.1, weights=(1.0, 2.0, 0.5))
    means = Means(model, model, objective, precision, Ranks(torch.device("cpu")), False)
    return StaticStep(means, Learner("", model, config, 20), None)


@pytest.mark.parametrize(
    ("mode", "changes"),
    [(mode, {}) for mode in MODES]
    + [(None, {"optimizer": "sgd"}), (None, {"optimizer": "adam", "clip_grad": 0.0}), ("plain", {"ema": 0.99})],
)
def test_three_steps_look_at_no_number_and_leave_nothing_behind(tiny, mode, changes):
    model = attn_vit(tiny, drop_path_rate=0.2)
    model.train()
    if mode is not None:
        assert apply_memory_mode(model, mode).changed == 2
    step = static_step(model, Bf16(), **changes)
    batches = [[Batch(torch.randn(4, 3, 32, 32), torch.arange(4) % 3)] for _ in range(3)]
    step.run(batches[0])
    alive = []
    with Watch() as watch:
        for batch in batches:
            step.run(batch)
            step.learner.optimizer.zero_grad()
            alive.append(sorted(storages().values()))
    assert not watch.found and len(watch.names) > 30
    assert alive[0] == alive[1] == alive[2]
    groups = step.learner.optimizer.param_groups
    assert all(isinstance(group["lr"], torch.Tensor) for group in groups)
    assert step.settle().images == 16 and not step.update.bad
    states = step.learner.optimizer.state.values()
    assert states and all(isinstance(s["step"], torch.Tensor) and s["step"] == 4 for s in states if "step" in s)


def test_the_watch_sees_the_plain_loop_look(tiny, static):
    """The same mode, around the loop that asks after each step whether gradients are finite."""
    with Watch() as watch:
        run(attn_vit(tiny), Fixed(4), epochs=1)
    assert "aten::_local_scalar_dense" in watch.found


def test_a_graph_that_cannot_be_captured_is_one_line(tiny, static, monkeypatch, capsys):
    static(Python(RuntimeError("operation not permitted\nwhen stream is capturing")))
    plain, ours = (attn_vit(tiny).double() for _ in range(2))
    stream = Stream(*[4] * 6)
    run(ours, stream)
    told = capsys.readouterr().err.strip()
    assert told.count("\n") == 0 and "--cuda-graph: a step could not be captured (RuntimeError: operation" in told
    monkeypatch.setattr(rules, "KINDS", ("cuda",))
    run(plain, stream)
    close(ours.state_dict(), plain.state_dict())


def test_the_calls_of_cuda(monkeypatch):
    """Without a GPU: steps and capture are on one stream, memory is counted first, and other threads may go on."""
    calls = []

    class Stream:
        def __init__(self, device=None):
            self.device = device

        def wait_stream(self, other):
            calls.append(("wait", self is own, other is own))

    class Graph:
        def replay(self):
            calls.append("replay")

    @contextlib.contextmanager
    def inside(what, **kwargs):
        calls.append((type(what).__name__, kwargs))
        yield

    own, device = Stream(), torch.device("cuda", 0)
    free = [100]
    for name, value in {
        "Stream": Stream, "CUDAGraph": Graph, "graph": inside, "stream": inside, "device": inside,
        "current_stream": lambda device: own, "synchronize": lambda device: calls.append("synchronize"),
        "empty_cache": lambda: calls.append("empty_cache"), "max_memory_allocated": lambda device: 90,
        "memory_allocated": lambda device: 30, "mem_get_info": lambda device: (free[0], 200),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    recorder = CudaRecorder(device)
    recorder.warm(lambda: calls.append("run"))
    assert calls == [("wait", False, True), ("Stream", {}), "run", ("wait", True, False)]
    calls.clear()
    replay = recorder.record(lambda: calls.append("run"), 0.5)  # 60 stay taken, 30 more are wanted beside them
    assert calls[:2] == ["synchronize", "empty_cache"] and calls[-1] == "run"
    assert calls[3] == ("Graph", {"stream": recorder.stream, "capture_error_mode": "thread_local"})
    replay()
    assert calls[-1] == "replay"
    free[0] = 89
    with pytest.raises(MemoryError, match="60 B would stay taken, 89 B are free; give a smaller --batch-size"):
        recorder.record(lambda: None, 0.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grad_checkpointing": True}, "--grad-checkpointing"),
        ({"optimizer": "lamb"}, "--optimizer lamb counts its steps"),
        ({"optimizer": "momentum", "opt_kwargs": ("dampening=0.5",)}, "--opt-kwargs dampening"),
        ({"passes": 2}, "--sam and --adversarial"),
        ({"precision": "fp16"}, "--precision fp16"),
        ({"world": 2}, "2 processes"),
        ({"joint": True}, "several tasks"),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(monkeypatch, changes, words):
    keys = ("passes", "precision", "world", "joint")
    about = {"precision": "fp32", "world": 1, **{k: v for k, v in changes.items() if k in keys}}
    world = about.pop("world")
    own = {k: v for k, v in changes.items() if k not in keys}
    monkeypatch.setattr(rules, "KINDS", ("cpu",))
    device = torch.device("cpu")
    for choice in ("auto", "off"):
        config = FinetuneConfig(cuda_graph=choice, **own)
        assert words in rules.reason_against(config, device, world, **about)
        rules.check_graph(config, device, world, **about)
    with pytest.raises(UsageError, match=f"`--cuda-graph` on: .*{words}.*auto") as info:
        rules.check_graph(FinetuneConfig(cuda_graph="on", **own), device, world, **about)
    assert "\n" not in str(info.value)


def test_auto_says_why_it_is_not_used_and_on_is_refused_on_a_cpu(tiny, static, config, capsys):
    with pytest.raises(UnavailableError, match="the device is the cpu"):
        finetune(config(cuda_graph="on"))
    static()
    run(attn_vit(tiny), Fixed(4), optimizer="lamb", epochs=1)
    assert "--cuda-graph: steps run without a graph, since --optimizer lamb" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["clipped", "accumulated", "averaged", "sgd"])
@pytest.mark.parametrize("mode", MODES)
def test_a_graph_gives_the_bits_of_the_steps_it_was_made_of(tiny, name, mode):
    """Random numbers included: a replay draws those that come next. The last batch of an epoch is a step apart."""
    found, graphs = [], []
    init = StaticStep.__init__

    def watched(self, *args):
        init(self, *args)
        graphs.append(self)

    for choice in ("on", "off"):
        model = attn_vit(tiny, embed_dim=128, drop_path_rate=0.2)
        apply_memory_mode(model, mode)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StaticStep, "__init__", watched)
            config = FinetuneConfig(epochs=2, lr=1e-3, cuda_graph=choice, **CASES[name])
            ranks = Ranks(torch.device("cuda", 0))
            stream = Fixed(*[8] * 8, 3)
            result = fit(
                model, Classification(3, mixup=0.8), [stream], config, Bf16(), ranks=ranks, show_progress=False
            )
        found.append((numbers(result.rows), {n: t.cpu() for n, t in model.state_dict().items()}))
    assert [step.recorded for step in graphs] == [True, False]
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][n], tensor) for n, tensor in found[1][1].items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_graph_trains_as_the_plain_loop_does(tiny):
    """Which divides by other roundings: the plain optimiser is not the fused one."""
    rows = []
    for optimizer in ("adamw", "adamwlegacy"):
        model, stream = attn_vit(tiny), Fixed(*[8] * 8, 3)
        config = FinetuneConfig(epochs=2, lr=1e-3, optimizer=optimizer)
        ranks = Ranks(torch.device("cuda", 0))
        rows.append(fit(model, Classification(3), [stream], config, Fp32(), ranks=ranks, show_progress=False).rows)
    assert [r["loss"] for r in rows[0]] == pytest.approx([r["loss"] for r in rows[1]], rel=1e-3)
