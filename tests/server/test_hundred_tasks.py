"""A hundred tasks of one base in the real server, changed while it answers; every answer is compared.

The reference of a task is timm's own model with weights that this file puts together from base and pack, in fp64.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from tritonclient.utils import InferenceServerException

from vtk.models.create import build_model
from vtk.packs.synthetic import write_synthetic
from vtk_export.triton.config import TritonConfig
from vtk_export.triton.export import export_triton

pytestmark = pytest.mark.server

TASKS, REQUESTS, CLIENTS, ROUNDS = 100, 5000, 16, 6
QUANTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}
CLASSES = (2, 3, 5, 7)
NAME, KWARGS, SIZE = "vit_tiny_patch16_224", {"depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 8}, 32
TOLERANCE, LOWEST = 2e-4, np.finfo(np.float32).min


def merged(pack: Path, base: dict[str, torch.Tensor]) -> Any:
    """Timm's model of a pack: base + scale · b · a, all else as the pack has it."""
    card, tensors = json.loads((pack / "task.json").read_text()), load_file(pack / "task.safetensors")
    state = {**base, **{k: v for k, v in tensors.items() if ":" not in k}}
    for name, fact in card["pack"]["factors"].items():
        if fact["rank"]:
            a, b = (tensors[f"{name}:{part}"].double() for part in "ab")
            if f"{name}:a:scale" in tensors:
                a, b = a * tensors[f"{name}:a:scale"].double()[:, None], b * tensors[f"{name}:b:scale"].double()
            state[name] = base[name].double() + fact["scale"] * (b @ a).view(base[name].shape)
    model = timm.create_model(NAME, img_size=SIZE, num_classes=len(card["classes"]), **KWARGS).double().eval()
    model.load_state_dict(state)
    return model


def near(row: np.ndarray, logits: np.ndarray) -> bool:
    """Whether a row of an answer is these logits and padding behind them."""
    return bool(np.abs(row[: len(logits)] - logits).max() <= TOLERANCE * np.abs(logits).max())


@dataclass
class State:
    """What a name means for a time.

    Attributes:
        logits: (images, classes) of the reference; None where there is no such task.
        since: before this moment no server can have known.
        until: after this moment none can serve it any more.
    """

    logits: np.ndarray | None
    since: float
    until: float = np.inf


@dataclass
class Ledger:
    """What every name meant when, and what clients saw."""

    states: dict[str, list[State]]
    images: np.ndarray
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    done: int = 0
    refused: int = 0
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, name: str, logits: np.ndarray | None) -> None:
        self.states.setdefault(name, [State(None, 0.0)]).append(State(logits, time.monotonic()))

    def end(self, name: str) -> None:
        """The newest state of a name was seen: a request sent from now on cannot meet an older one."""
        for state in self.states[name][:-1]:
            state.until = min(state.until, time.monotonic())

    def meant(self, name: str, sent: float, answered: float) -> list[np.ndarray | None]:
        return [s.logits for s in list(self.states[name]) if s.since <= answered and s.until >= sent]

    def check(self, found: dict[str, np.ndarray], names: list[str], at: list[int], sent: float) -> None:
        answered, wrong = time.monotonic(), []
        for row, label, name, image in zip(found["logits"], found["label"][:, 0], names, at, strict=True):
            known = [logits[image] for logits in self.meant(name, sent, answered) if logits is not None]
            if not any(
                near(row, r) and (row[len(r) :] == LOWEST).all() and label.decode() == f"class {r.argmax()}"
                for r in known
            ):  # fmt: skip
                wrong.append(f"{name} {image}: {row.tolist()}")
        with self.lock:
            self.wrong += wrong
            self.done += 1
            self.times.append(answered - sent)
            self.counts.update(("vtk_task_requests", name) for name in set(names))
            self.counts.update(("vtk_task_images", name) for name in names)

    def refuse(self, message: str, names: list[str], sent: float) -> None:
        """An error is right if it names a task that may have been absent at that time."""
        answered = time.monotonic()
        absent = {n for n in names if any(known is None for known in self.meant(n, sent, answered))}
        with self.lock:
            if not any(f"unknown task '{name}'" in message for name in absent):
                self.failed.append(f"{names}: {message}")
            self.refused += 1


@dataclass
class Hundred:
    """A server with a model of a hundred tasks, packs that come later, and the ledger."""

    server: Any
    tools: Any
    config: TritonConfig
    packs: dict[str, list[Path]]
    base: dict[str, torch.Tensor]
    ledger: Ledger
    updates: list[float] = field(default_factory=list)

    def logits(self, pack: Path) -> np.ndarray:
        with torch.no_grad():
            return merged(pack, self.base)(torch.from_numpy(self.ledger.images).double()).numpy()  # type: ignore[no-any-return]

    def ask(self, client: Any, names: list[str], at: list[int]) -> np.ndarray | None:
        """Send one request and check what comes back; return the logits, or None of an error."""
        sent = time.monotonic()
        try:
            found = self.tools.infer(client, self.config.name, self.ledger.images[at], names)
        except InferenceServerException as error:
            self.ledger.refuse(str(error), names, sent)
            return None
        self.ledger.check(found, names, at, sent)
        logits: np.ndarray = found["logits"]
        return logits

    def send(self, seed: int, stop: threading.Event) -> None:
        rng = np.random.default_rng(seed)
        with self.server.client() as client:
            while not stop.is_set():
                count = rng.integers(1, 4)
                names = [list(self.ledger.states)[i] for i in rng.integers(0, len(self.ledger.states), count)]
                self.ask(client, names, rng.integers(0, len(self.ledger.images), count).tolist())

    def change(self, new: dict[str, Path], gone: list[str]) -> None:
        """Export with some tasks added or replaced and some removed, and wait until each was seen."""
        for name, pack in new.items():
            self.ledger.begin(name, self.logits(pack))
        for name in gone:
            self.ledger.begin(name, None)
        config = TritonConfig(**{**vars(self.config), "update": True, "remove": tuple(gone)})
        start = time.monotonic()
        result = export_triton(new, config, show=False).models[0]
        self.updates.append(time.monotonic() - start)
        assert (result.version, result.updated) == (1, True)
        limit = time.monotonic() + 120
        with self.server.client() as client:
            for name in (*new, *gone):
                while not self.seen(client, name):
                    assert time.monotonic() < limit, f"{name} was not taken up\n{self.server.tail()}"
                    time.sleep(0.05)
                self.ledger.end(name)

    def seen(self, client: Any, name: str) -> bool:
        wanted, found = self.ledger.states[name][-1].logits, self.ask(client, [name], [0])
        return wanted is found if wanted is None or found is None else near(found[0], wanted[0])


@pytest.fixture(params=["vtk", "python"])
def hundred(request: Any, lab: Any, tools: Any, tmp_path: Path) -> Iterator[Hundred]:
    """Ranks of 0 to 8, factors of all types; five further packs, and another version of ten."""
    base = load_file(lab.weights)
    starts = {
        classes: build_model(NAME, num_classes=classes, img_size=SIZE, weights=lab.weights, kwargs=dict(KWARGS))
        for classes in CLASSES
    }
    packs: dict[str, list[Path]] = {}
    names = [f"task-{i:03}" for i in range(TASKS + ROUNDS)]
    for i, name in enumerate(names + names[10 : 10 + ROUNDS]):
        path = tmp_path / "packs" / f"{name}-{i}"
        rank, dtype = [i % 9, 2, 5], ("fp32", "bf16", "int8")[i % 3]
        write_synthetic(path, starts[CLASSES[i % 4]], rank=rank, dtype=dtype, seed=i)  # type: ignore[arg-type]
        packs.setdefault(name, []).append(path)
    config = TritonConfig(
        out=tmp_path / "models", backend=request.param, name="many", max_batch_size=16, factor_dtype="fp32"
    )
    export_triton({name: packs[name][0] for name in names[:TASKS]}, config, show=False)
    ledger = Ledger({}, lab.images(12).numpy())
    server = tools.Server(config.out, tmp_path, polls=False, metrics=True)
    try:
        made = Hundred(server, tools, config, packs, base, ledger)
        check_apart([made.logits(pack) for versions in packs.values() for pack in versions])
        ledger.states = {name: [State(made.logits(packs[name][0]), 0.0)] for name in names[:TASKS]}
        server.wait("many")
        yield made
    finally:
        server.stop()


def check_apart(every: list[np.ndarray]) -> None:
    """No logits of one version of a task would pass for those of another, so a mix-up is always seen."""
    for i, one in enumerate(every):
        for other in every[:i]:
            assert one.shape != other.shape or not any(near(a, b) for a, b in zip(one, other, strict=True))


def test_tasks_come_change_and_go_under_load_and_every_answer_is_right(hundred: Hundred) -> None:
    """5,000 answers for 16 clients; in six rounds tasks are added, replaced, removed and brought back."""
    ledger, stop, names = hundred.ledger, threading.Event(), list(hundred.packs)
    threads = [threading.Thread(target=hundred.send, args=(seed, stop)) for seed in range(CLIENTS)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    try:
        for i in range(ROUNDS):
            while ledger.done < i * REQUESTS // ROUNDS and not ledger.failed and not ledger.wrong:
                time.sleep(0.05)
            new = {names[TASKS + i]: hundred.packs[names[TASKS + i]][0], names[10 + i]: hundred.packs[names[10 + i]][1]}
            if i > 1:
                new[names[i - 2]] = hundred.packs[names[i - 2]][0]  # which was removed two rounds before
            hundred.change(new, [names[i]])
        while ledger.done < REQUESTS and not ledger.failed and not ledger.wrong:
            time.sleep(0.05)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    seconds = time.monotonic() - start
    told = {
        "answered": ledger.done, "refused": ledger.refused, "failed": len(ledger.failed), "wrong": len(ledger.wrong),
        "per second": round(ledger.done / seconds),
        **{f"{name}_ms": round(1000 * float(np.quantile(ledger.times, q))) for name, q in QUANTILES.items()},
        "updates_s": [round(s, 1) for s in hundred.updates], "pss_mb": round(hundred.server.pss("many") / 1e6),
    }  # fmt: skip
    print(f"{hundred.config.backend}: {TASKS} tasks, {ROUNDS} changes, {CLIENTS} clients: {json.dumps(told)}")
    assert ledger.failed == [] and ledger.wrong == [], (ledger.failed[:3], ledger.wrong[:3], hundred.server.tail())
    assert ledger.done >= REQUESTS and ledger.refused > 0
    said = [line for line in hundred.server.log.read_text(errors="replace").splitlines() if line.startswith("E")]
    assert not any("many" in line for line in said), said
    check_counts(hundred)


def check_counts(hundred: Hundred) -> None:
    """The server's own counts by task are those of the clients, of removed and replaced tasks too."""
    limit = time.monotonic() + 10
    while True:
        counts = hundred.server.counts("many")
        found = {key: value for key, value in counts.items() if key[0] in ("vtk_task_requests", "vtk_task_images")}
        if found == hundred.ledger.counts or time.monotonic() > limit:
            break
        time.sleep(0.2)
    assert found == hundred.ledger.counts
    assert counts["vtk_tasks", ""] == TASKS + ROUNDS - 2 and counts["vtk_unknown_tasks", ""] > 0
