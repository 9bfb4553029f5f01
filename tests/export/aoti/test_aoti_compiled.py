"""A compiled ``.pt2`` as its README says to use it: from Python and C++, in processes that have no vtk."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vtk.__main__ import main
from vtk.fused import fuse
from vtk.runtime import aoti_file
from vtk.runtime.backends.base import load_backend
from vtk.runtime.opening import open_source

pytestmark = pytest.mark.slow

ALONE = "import sys\nsys.dont_write_bytecode = True\nsys.modules['vtk'] = sys.modules['vtk_export'] = None\n"
"""Before a program: there is no vtk."""


@pytest.fixture(scope="session")
def compiled(packed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of ``packed``, verified on its photographs."""
    out = tmp_path_factory.mktemp("aoti") / "out"
    assert main(["export", "aoti", str(packed.path), "--out", str(out), "--device", "cpu", "--data",
                 str(packed.photos), "--threads", "1"]) == 0  # fmt: skip
    return out


@pytest.fixture
def images(tmp_path: Path) -> torch.Tensor:
    values = torch.randn(33, 3, 32, 48, generator=torch.Generator().manual_seed(5))
    np.save(tmp_path / "images.npy", values.numpy())
    return values


def alone(code: str, folder: Path, *words: object, **environment: str) -> str:
    """Run a program in ``folder``, as its current one, without vtk; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE + textwrap.dedent(code), *map(str, words)], cwd=folder, capture_output=True,
        text=True, timeout=300, env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **environment}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks(page: str, language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", page, re.S)
    return str(found)


def expected(packed: Any, images: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return packed.model().double()(images.double()).numpy()


def close(found: np.ndarray, wanted: np.ndarray) -> bool:
    return found.shape == wanted.shape and bool(np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max())


def predicted(source: Path, photos: Path, scratch: Path, capture: Any) -> list[str]:
    """Return the most likely class of each image, as ``vtk predict`` gives it."""
    capture.readouterr()
    assert main(["predict", str(source), str(photos), "--out", str(scratch / "p.csv"), "--json"]) == 0
    return [p["labels"][0] for p in json.loads(capture.readouterr().out)["predictions"]]


def test_the_lines_of_the_page_classify_like_the_pack(
    packed, compiled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = sorted((packed.photos / "a").iterdir())
    page = (compiled / "README.md").read_text("utf-8")
    ask = "\nimport json\nprint(json.dumps([classify(path)[0][0] for path in sys.argv[1:]]))"
    found = json.loads(alone(blocks(page, "python") + ask, compiled, *photos, AOTI_RUNTIME_CHECK_INPUTS="0"))
    assert found == predicted(packed.path, packed.photos, tmp_path, capsys) and len(found) == 6
    assert "é" in page and "unsafe" in page and "0.5, 0.5, 0.5" in page


def test_after_an_unchecked_use_in_the_same_process_the_loader_is_still_right(
    packed, compiled: Path, images: torch.Tensor, tmp_path: Path
) -> None:
    code = """
    import numpy as np
    import torch
    import torch._inductor
    from torch._inductor.package import load_package
    images = torch.from_numpy(np.load(sys.argv[1] + "/images.npy"))
    last = images.to(memory_format=torch.channels_last)
    try:
        torch._inductor.aoti_load_package("model.pt2")
    except RuntimeError as error:
        assert "batch_1" in str(error), error
    else:
        raise SystemExit("there is a model of the default name")
    bare = load_package("model.pt2", "batch_n")
    unchecked = bare(images), bare(last)
    assert not torch.allclose(*unchecked), "the danger is gone: is the loader still needed?"
    from load import load
    model = load()
    found = [model(last), model(last[:1]), torch.cat([model(image[None]) for image in last])]
    np.savez(sys.argv[1] + "/found.npz", *[logits.numpy() for logits in found], unchecked[0].numpy())
    for wrong in (images[:0], images.half(), images[:, :, :24], images[0], images[:1].expand(4097, -1, -1, -1)):
        try:
            model(wrong)
        except (TypeError, ValueError) as error:
            print(error)
        else:
            raise SystemExit(f"answered {wrong.shape}")
    """
    said = alone(code, compiled, tmp_path, AOTI_RUNTIME_CHECK_INPUTS="0")
    assert len(said.splitlines()) == 5 and "images are (0, 3, 32, 48); this model takes (1 to 4096, 3, 32, 48)" in said
    wanted = expected(packed, images)
    for logits, part in zip(np.load(tmp_path / "found.npz").values(), (33, 1, 33, 33), strict=True):
        assert close(logits, wanted[:part])


def test_several_threads_may_use_a_loaded_file(packed, compiled: Path, images: torch.Tensor, tmp_path: Path) -> None:
    code = """
    import threading
    import numpy as np
    import torch
    from load import load
    images = torch.from_numpy(np.load(sys.argv[1] + "/images.npy"))
    wanted = torch.from_numpy(np.load(sys.argv[1] + "/wanted.npy")).float()
    done = []
    def client(model, number):
        for turn in range(100):
            low, count = (number + turn) % 8, 1 + (number * turn) % 5
            part = images[low:low + count]
            if turn % 3 == 0:
                part = part.to(memory_format=torch.channels_last)
            if (turn + number) % 7 == 0:
                try:
                    model(part.double())
                except TypeError:
                    pass
            done.append(torch.allclose(model(part), wanted[low:low + count], atol=1e-4 * wanted.abs().max()))
    model = load()
    threads = [threading.Thread(target=client, args=(model, number), daemon=True) for number in range(8)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    assert len(done) == 800 and all(done), (len(done), done.count(False))
    """
    np.save(tmp_path / "wanted.npy", expected(packed, images))
    alone(code, compiled, tmp_path)


THREADS = r"""
#define main example_main
#include "example.cpp"
#undef main
#include <thread>

// `threads MODEL`: six threads, half of them with images that are refused; else the example itself.
int main(int count, char** words) {
  if (count != 2) return example_main(count, words);
  Classifier classify(words[1]);
  const at::Tensor images = at::rand({3, 3, 32, 48}), wanted = classify(images);
  const at::Tensor last = images.permute({0, 2, 3, 1}).contiguous().permute({0, 3, 1, 2});
  const std::vector<at::Tensor> wrong{images.slice(0, 0, 0), images.slice(2, 0, 24), images[0], images.to(at::kLong)};
  std::vector<std::thread> threads;
  std::vector<int> right(6), refused(6);
  for (int number = 0; number < 6; ++number)
    threads.emplace_back([&, number] {
      for (int turn = 0; turn < 500; ++turn) {
        try {
          if (number % 2) classify(wrong[turn % 4]);
          else if (turn % 2) right[number] += at::allclose(classify(last), wanted, 1e-3, 1e-3);
          else right[number] += at::allclose(classify(last.slice(0, 1, 2)), wanted.slice(0, 1, 2), 1e-3, 1e-3);
        } catch (const std::invalid_argument&) { ++refused[number]; }
      }
    });
  for (auto& thread : threads) thread.join();
  for (int number = 0; number < 6; ++number) std::cout << right[number] << " " << refused[number] << "\n";
  return 0;
}
"""


def test_the_example_in_c_plus_plus_is_built_and_classifies_like_the_pack(
    packed, compiled: Path, images: torch.Tensor, tmp_path: Path
) -> None:
    for name in ("example.cpp", "model.pt2"):
        (tmp_path / name).symlink_to(compiled / name)
    images[:4].numpy().tofile(tmp_path / "images.f32")
    page = (compiled / "README.md").read_text("utf-8")
    python = f'python() {{ {sys.executable} "$@"; }}\n'
    (tmp_path / "threads.cpp").write_text(THREADS)
    lines = blocks(page, "sh").replace("-O2 example.cpp", "-O0 -pthread threads.cpp")
    assert "threads.cpp" in lines and lines.endswith("./example model.pt2 images.f32 2\n")
    built = subprocess.run(
        ["bash", "-ec", python + lines], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert built.returncode == 0 and len(built.stdout.splitlines()) == 2, built.stderr
    wanted = expected(packed, images)

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["./example", *words], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
        )

    for count in (1, 4):
        lines = [line.split() for line in run("model.pt2", "images.f32", str(count)).stdout.splitlines()]
        assert [int(found) for found, _ in lines] == wanted[:count].argmax(1).tolist()
        assert close(np.array([float(logit) for _, logit in lines]), wanted[:count].max(1))
    for count, said in (("0", "does not take these images"), ("5", "holds fewer images")):
        refused = run("model.pt2", "images.f32", count)
        assert refused.returncode == 1 and said in refused.stderr
    counts = run("model.pt2").stdout.split("\n")
    assert counts[:6] == ["500 0", "0 500"] * 3


def test_our_own_backend_runs_any_batch(
    packed, compiled: Path, images: torch.Tensor, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "0")
    source = open_source(compiled / "model.pt2")
    assert source.card.classes == packed.card.classes
    backend = load_backend("aoti", source, threads=1)
    wanted = expected(packed, images)
    for batch in (1, 5, 33):
        for laid in (images[:batch], images[:batch].to(memory_format=torch.channels_last), images[:batch].double()):
            assert close(backend.run({"pixel_values": laid})["logits"].numpy(), wanted[:batch])
    backend.close()
    assert "Error" not in capfd.readouterr().err  # the refusals that prove the checks
    labels = [predicted(where, packed.photos, tmp_path, capfd) for where in (compiled / "model.pt2", packed.path)]
    assert labels[0] == labels[1] and len(labels[0]) == 6
    options = ["--device", "cpu", "--batch-sizes", "1,3", "--duration", "0.05", "--threads", "1"]
    assert (
        main(["profile", str(compiled / "model.pt2"), "--backends", "aoti", "--reference", str(packed.path), *options])
        == 0
    )
    assert "aoti: aotinductor cpu" in capfd.readouterr().out


def test_a_file_of_version_0_1_still_runs_any_batch(
    packed, images: torch.Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = {
        "vtk": packed.card.to_json(), "vtk.precision": "fp32", "vtk.cpu": aoti_file.cpu_level(),
        "vtk.torch": aoti_file.torch_release(),
    }  # fmt: skip
    with torch.no_grad():
        program = torch.export.export(
            fuse(packed.model(), torch.float32, keep_source=False).requires_grad_(False), (images[:2],),
            dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=4096)},),
        )  # fmt: skip
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2"), inductor_configs={"aot_inductor.metadata": meta}
        )
    for says in ("0", "1"):
        monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", says)
        backend = load_backend("aoti", open_source(tmp_path / "model.pt2"))
        wanted = expected(packed, images)
        for batch in (1, 5, 33):
            laid = images[:batch].to(memory_format=torch.channels_last)
            assert close(backend.run({"pixel_values": laid})["logits"].numpy(), wanted[:batch])
        backend.close()
    labels = [predicted(where, packed.photos, tmp_path, capsys) for where in (tmp_path / "model.pt2", packed.path)]
    assert labels[0] == labels[1] and len(labels[0]) == 6
