"""Exported repositories in the real server, through tritonclient's http and grpc."""

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tritonclient.utils import InferenceServerException

from vtk.data.decoding.images import load_image
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.packs.cards import read_card
from vtk.packs.synthetic import write_synthetic
from vtk_export.triton.config import TritonConfig
from vtk_export.triton.export import export_triton

pytestmark = pytest.mark.server

CLASSES = {"pets": 3, "cars": 7, "food": 2, "dogs": 5}
MODELS = ("many", "bank")
CLIENTS, REQUESTS = 32, 2000
LOWEST = np.finfo(np.float32).min


def export(repo: Path, packs: dict[str, Path], backend: str, **options: Any) -> Any:
    sources = tuple(f"{name}={path}" for name, path in packs.items())
    return export_triton(sources, TritonConfig(out=repo, backend=backend, **options), show=False)  # type: ignore[arg-type]


@dataclass
class Running:
    """Servers with their packs, images and what each pack's own model makes of them.

    One polls its repository, and has the models on onnxruntime; one does not, and has the bank.
    """

    polling: Any
    fixed: Any
    packs: dict[str, Path]
    images: np.ndarray
    logits: dict[str, np.ndarray]

    def of(self, model: str) -> Any:
        return self.fixed if model == "bank" else self.polling


@pytest.fixture(scope="session")
def running(lab: Any, tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("server")
    packs = {name: lab.pack(name, classes, seed) for seed, (name, classes) in enumerate(CLASSES.items())}
    three = {name: packs[name] for name in ("pets", "cars", "food")}
    polling, fixed = root / "polling", root / "fixed"
    export(polling / "models", three, "python", name="many", warmup=True, max_batch_size=16)
    export(polling / "models", {"one": packs["pets"]}, "python", name="one")
    export(polling / "models", {"plain": packs["pets"]}, "onnxruntime", warmup=True)
    export(polling / "models", {"fixed": packs["pets"]}, "onnxruntime", static_batch=2, warmup=True)
    export(polling / "models", {"engine": packs["pets"]}, "tensorrt", dtype="fp16", warmup=True)
    small = {str(rank): write_synthetic(root / "small" / str(rank), packs["pets"], rank=rank) for rank in (1, 2)}
    export(polling / "models", small, "onnxruntime", name="numbers", form="factors", warmup=True)
    export(fixed / "models", three, "vtk", name="bank", warmup=True, max_batch_size=16)
    images = lab.images(12)
    logits = {name: lab.logits(path, images) for name, path in packs.items()}
    servers = []
    try:
        servers = [tools.Server(polling / "models", polling), tools.Server(fixed / "models", fixed, polls=False)]
        found = Running(*servers, packs, images.numpy(), logits)
        for model in (*MODELS, "one"):
            found.of(model).wait(model)
        yield found
    finally:
        for server in servers:
            server.stop()


both = pytest.mark.parametrize("protocol", ["http", "grpc"])


def check(found: dict[str, np.ndarray], wanted: list[np.ndarray]) -> float:
    """Return the largest error of a response's rows, relative to each row's largest logit; padding must be exact."""
    worst = 0.0
    for row, logits in zip(found["logits"], wanted, strict=True):
        assert (row[len(logits) :] == LOWEST).all()
        worst = max(worst, float(np.abs(row[: len(logits)] - logits).max() / np.abs(logits).max()))
    return worst


@pytest.mark.parametrize("model", MODELS)
def test_metadata_says_what_a_client_needs(running: Running, model: str) -> None:
    with running.of(model).client("http") as client:
        meta = client.get_model_metadata(model)
    shapes = {entry["name"]: (entry["datatype"], entry["shape"]) for entry in (*meta["inputs"], *meta["outputs"])}
    width = 7 if model == "many" else -1
    assert shapes == {
        "pixel_values": ("FP32", [-1, 3, 32, 32]), "task": ("BYTES", [-1, 1]), "logits": ("FP32", [-1, width]),
        "label": ("BYTES", [-1, 1]), "score": ("FP32", [-1, 1]),
    }  # fmt: skip


@both
@pytest.mark.parametrize("model", MODELS)
def test_a_batch_of_several_tasks_gives_torch_s_logits_labels_and_scores(
    running: Running, tools: Any, model: str, protocol: str
) -> None:
    tasks = ["cars", "pets", "pets", "food", "cars"]
    with running.of(model).client(protocol) as client:
        found = tools.infer(client, model, running.images[:5], tasks)
    wanted = [running.logits[task][i] for i, task in enumerate(tasks)]
    assert check(found, wanted) < 1e-4
    for i, (task, logits) in enumerate(zip(tasks, wanted, strict=True)):
        assert found["label"][i, 0].decode() == f'{task} "{logits.argmax()}"\né'
        share = np.exp(logits.astype(np.float64))
        assert found["score"][i, 0] == pytest.approx(share.max() / share.sum(), rel=1e-3)


@both
def test_a_model_of_one_task(running: Running, tools: Any, protocol: str) -> None:
    with running.polling.client(protocol) as client:
        found = tools.infer(client, "one", running.images[:3], ["one"] * 3)
    assert check(found, list(running.logits["pets"][:3])) < 1e-4


@pytest.mark.parametrize("model", MODELS)
def test_requests_of_many_clients_are_joined_across_tasks(running: Running, tools: Any, model: str) -> None:
    with running.of(model).client() as client:
        before = statistics(client, model)
        load = Load(running, tools, model, {name: [running.logits[name]] for name in ("pets", "cars", "food")})
        load.run(lambda: None, least=300)
        after = statistics(client, model)
    assert load.failed == [] and load.wrong == []
    calls, rows = (after[key] - before[key] for key in ("calls", "rows"))
    assert rows >= 300
    assert calls < rows / 2, f"{rows} images in {calls} calls: the server joined hardly any"


@pytest.mark.parametrize("model", MODELS)
def test_a_wrong_request_is_told_so_while_others_go_on(running: Running, tools: Any, model: str) -> None:
    load = Load(running, tools, model, {name: [running.logits[name]] for name in ("pets", "cars", "food")})
    images = running.images
    wrong: dict[str, Callable[[Any], Any]] = {
        "unknown task": lambda c: tools.infer(c, model, images[:1], ["birds"]),
        "shape": lambda c: tools.infer(c, model, images[:1, :, :16], ["pets"]),
        "channels": lambda c: tools.infer(c, model, images[:1, :1], ["pets"]),
        "no batch": lambda c: tools.infer(c, model, images[0], ["pets"]),
        "too many": lambda c: tools.infer(c, model, np.concatenate([images] * 2), ["pets"] * 24),
        "names": lambda c: tools.infer(c, model, images[:2], ["pets"]),
        "type": lambda c: infer_half(c, model, images[:1]),
    }
    said = {}

    def complain() -> None:
        with running.of(model).client() as client:
            for name, send in wrong.items():
                with pytest.raises(InferenceServerException) as caught:
                    send(client)
                said[name] = str(caught.value)

    load.run(complain, least=0)
    assert "birds" in said["unknown task"] and "'pets'" in said["unknown task"]
    assert load.failed == [] and load.wrong == []


def test_exporting_again_under_load_fails_no_request(running: Running, tools: Any, lab: Any) -> None:
    """2,000 requests of 32 clients; meanwhile version 2 comes, whose `pets` was trained further."""
    further = {**running.packs, "pets": lab.pack("pets", 3, seed=77, folder="further")}
    new = lab.logits(further["pets"], lab.images(12))
    assert np.abs(new - running.logits["pets"]).max() > 0.1 * np.abs(new).max()
    known = {name: [running.logits[name]] for name in ("pets", "cars", "food")}
    known["pets"].append(new)
    load = Load(running, tools, "many", known)

    def publish() -> None:
        result = export(running.polling.repo, further, "python", name="many", warmup=True, max_batch_size=16)
        assert result.models[0].version == 2
        running.polling.wait("many", 2)

    load.run(publish, least=REQUESTS)
    report("re-export to version 2", load)
    assert load.failed == [] and load.wrong == []
    with running.polling.client() as client:
        found = tools.infer(client, "many", running.images[:2], ["pets", "dogs"])
    assert check(found, [new[0], running.logits["dogs"][1]]) < 1e-4


def test_packs_come_change_and_go_under_load(running: Running, tools: Any, lab: Any) -> None:
    """2,000 requests of 32 clients; meanwhile a pack is added, one changed and one removed, in the same process."""
    known = {name: [running.logits[name]] for name in ("pets", "cars")}
    load = Load(running, tools, "bank", known)
    processes = pids(running.fixed, "bank")

    def more() -> None:
        four = export(running.fixed.repo, running.packs, "vtk", name="bank", warmup=True, max_batch_size=16)
        assert four.models[0].updated and four.models[0].version == 1
        until_answers(running, tools, "bank", "dogs", running.logits["dogs"])
        changed = {**running.packs, "dogs": lab.pack("dogs", 6, seed=78, folder="further")}
        del changed["food"]
        export(running.fixed.repo, changed, "vtk", name="bank", warmup=True, max_batch_size=16)
        until_answers(running, tools, "bank", "dogs", lab.logits(changed["dogs"], lab.images(12)))
        with running.fixed.client() as client, pytest.raises(InferenceServerException, match="food"):
            tools.infer(client, "bank", running.images[:1], ["food"])

    load.run(more, least=REQUESTS)
    report("packs added, changed and removed", load)
    assert load.failed == [] and load.wrong == []
    assert pids(running.fixed, "bank") == processes


def test_a_config_for_onnxruntime_is_understood(running: Running) -> None:
    with running.polling.client("http") as client:
        index = {entry["name"]: entry for entry in client.get_model_repository_index()}
    for name in ("plain", "fixed", "engine", "numbers"):
        # the wheel's server has no such back-end; anything wrong with the config is said before that
        assert "unable to find backend library for backend 'onnxruntime'" in index[name]["reason"], index[name]


@both
def test_the_written_client_names_what_is_on_a_photograph(
    running: Running, lab: Any, tmp_path: Path, protocol: str
) -> None:
    rng = np.random.default_rng(3)
    Image.fromarray(rng.integers(0, 256, (40, 61, 3), dtype=np.uint8)).save(tmp_path / "photo.png")
    spec = read_card(running.packs["cars"]).input
    best = int(
        lab.logits(running.packs["cars"], eval_transform(spec)(load_image(tmp_path / "photo.png"))[None]).argmax()
    )
    client = running.fixed.repo / "bank" / "client.py"
    told = subprocess.run(
        [sys.executable, client, tmp_path / "photo.png", "--task", "cars", "--protocol", protocol,
         "--url", running.fixed.url[protocol]],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f'photo.png: cars "{best}"\\né' in told.stdout  # one line for one image


def test_four_tasks_take_little_more_memory_than_one(running: Running, tools: Any, tmp_path_factory: Any) -> None:
    """Models in which weights outweigh Python: four have their own attention, the rest is in memory once."""
    root = tmp_path_factory.mktemp("large")
    lab = tools.Lab(root, {"depth": 6, "embed_dim": 384, "num_heads": 6, "patch_size": 16}, 64, noise=0.01)
    packs = {name: lab.pack(name, classes, seed) for seed, (name, classes) in enumerate(CLASSES.items())}
    export(running.polling.repo, packs, "python", name="large4", server_threads=1)
    export(running.polling.repo, {"pets": packs["pets"]}, "python", name="large1", server_threads=1)
    images = lab.images(2)
    used = {}
    with running.polling.client() as client:
        for model, names in {"large4": list(packs), "large1": ["pets"]}.items():
            running.polling.wait(model)
            for name in names:
                found = tools.infer(client, model, images.numpy(), [name] * 2)
                assert check(found, list(lab.logits(packs[name], images))) < 1e-4
            used[model] = running.polling.pss(model)
        apart = {"pets": "large1"}
        for name in sorted(packs.keys() - apart.keys()):  # what they would take without sharing
            apart[name] = f"large-{name}"
            export(running.polling.repo, {name: packs[name]}, "python", name=apart[name], server_threads=1)
        for name, model in apart.items():
            running.polling.wait(model)
            found = tools.infer(client, model, images.numpy(), [name] * 2)
            assert check(found, list(lab.logits(packs[name], images))) < 1e-4
        separate = sum(running.polling.pss(model) for model in apart.values()) / used["large1"]
    for model in ("large4", *apart.values()):
        shutil.rmtree(running.polling.repo / model)
    ratio = used["large4"] / used["large1"]
    print(
        f"PSS of four tasks {used['large4'] / 1e6:.0f} MB, of one {used['large1'] / 1e6:.0f} MB: {ratio:.2f}×; four "
        f"models of one task each: {separate:.2f}×"
    )
    assert ratio <= 2.3 and ratio < separate


class Load:
    """Clients that send one or two images of random tasks, one request after the other, and check every row.

    Attributes:
        done: seconds of the requests that were answered.
        failed: what was not answered.
        wrong: answers that none of the known models gives.
    """

    def __init__(self, running: Running, tools: Any, model: str, known: dict[str, list[np.ndarray]]) -> None:
        self.running, self.tools, self.model, self.known = running, tools, model, known
        self.done: list[float] = []
        self.failed: list[str] = []
        self.wrong: list[str] = []
        self.stop = threading.Event()

    def run(self, meanwhile: Callable[[], object], least: int) -> None:
        """Send while ``meanwhile`` works, and on until ``least`` requests and some more after it were answered."""
        with self.running.of(self.model).client() as client:
            threads = [threading.Thread(target=self._send, args=(client, seed)) for seed in range(CLIENTS)]
            for thread in threads:
                thread.start()
            try:
                meanwhile()
                least = max(least, len(self.done) + 2 * CLIENTS)
                while len(self.done) < least and not self.failed and not self.wrong:
                    time.sleep(0.1)
            finally:
                self.stop.set()
                for thread in threads:
                    thread.join()

    def _send(self, client: Any, seed: int) -> None:
        rng = np.random.default_rng(seed)
        names = list(self.known)
        while not self.stop.is_set():
            at = rng.integers(0, len(self.running.images), rng.integers(1, 3))
            tasks = [names[i] for i in rng.integers(0, len(names), len(at))]
            start = time.perf_counter()
            try:
                found = self.tools.infer(client, self.model, self.running.images[at], tasks)
            except InferenceServerException as error:
                self.failed.append(str(error))
                continue
            self.done.append(time.perf_counter() - start)
            for row, task, image in zip(found["logits"], tasks, at, strict=True):
                rows = [logits[image] for logits in self.known[task]]
                one = {"logits": row[None]}
                if min(check(one, [wanted]) for wanted in rows) > 1e-4:
                    self.wrong.append(f"{task} {image}: {row.tolist()}")


def statistics(client: Any, model: str) -> dict[str, int]:
    found = client.get_inference_statistics(model, as_json=True)["model_stats"]
    return {
        "calls": sum(int(entry.get("execution_count", 0)) for entry in found),
        "rows": sum(int(entry.get("inference_count", 0)) for entry in found),
    }


def infer_half(client: Any, model: str, images: np.ndarray) -> Any:
    import tritonclient.grpc as grpc

    inputs = [grpc.InferInput("pixel_values", list(images.shape), "FP16"), grpc.InferInput("task", [1, 1], "BYTES")]
    inputs[0].set_data_from_numpy(images.astype(np.float16))
    inputs[1].set_data_from_numpy(np.array([[b"pets"]], dtype=np.object_))
    return client.infer(model, inputs)


def until_answers(running: Running, tools: Any, model: str, task: str, logits: np.ndarray) -> None:
    """Wait until a task is there and its logits are these."""
    limit, said = time.monotonic() + 120, ""
    with running.of(model).client() as client:
        while time.monotonic() < limit:
            try:
                found = tools.infer(client, model, running.images[:1], [task])
                if found["logits"].shape[1] >= logits.shape[1] and check(found, [logits[0]]) < 1e-4:
                    return
                said = "other logits"
            except (InferenceServerException, AssertionError) as error:
                said = str(error)
            time.sleep(0.2)
    pytest.fail(f"{task}: {said}\n{running.of(model).tail()}")


def pids(server: Any, model: str) -> set[int]:
    import psutil

    children = psutil.Process(server.process.pid).children(recursive=True)
    return {c.pid for c in children if any(f"/{model}/" in part for part in c.cmdline())}


def report(what: str, load: Load) -> None:
    times = sorted(1000 * t for t in load.done)
    told = {"requests": len(times), "failed": len(load.failed), "wrong rows": len(load.wrong),
            "p50_ms": round(times[len(times) // 2], 1), "max_ms": round(times[-1], 1)}  # fmt: skip
    print(f"{what}, {CLIENTS} clients: {json.dumps(told)}")
