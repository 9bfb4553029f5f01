"""README's fenced blocks, and a newcomer who runs every line of them in order, offline."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from vtk.__main__ import main

REPO = Path(__file__).resolve().parents[2]
MODEL = "vit_tiny_patch16_224"
_COMMIT = "0" * 40


def blocks(text: str) -> list[tuple[str, str]]:
    """Return language and text of every fenced block; a fence without a language has the language ""."""
    return re.findall(r"^ *(?:```|~~~)([^\n`]*)\n(.*?)^ *(?:```|~~~) *$", text, re.M | re.S)


def lines(block: str) -> list[list[str]]:
    """Return the command lines of a block, split as a shell does."""
    texts = (re.sub(r"\s+#.*$", "", line) for line in block.replace("\\\n", " ").splitlines())
    return [shlex.split(text) for text in texts if text.strip()]


def table(text: str) -> list[list[str]]:
    """Return the cells of a printed table, row by row: they are two or more spaces apart."""
    return [re.split(r" {2,}", line.strip()) for line in text.strip().splitlines()]


def make_folder(root: Path) -> None:
    """Write what README assumes: two folders of photographs, and one photograph."""
    rng = np.random.default_rng(0)
    for folder, classes in {"pets": ("cat", "dog"), "cars": ("bus", "van")}.items():
        for part, count in (("train", 4), ("val", 2)):
            for label, name in enumerate(classes):
                (root / "data" / folder / part / name).mkdir(parents=True)
                for i in range(count):
                    pixels = rng.integers(0, 150, (64, 80, 3))
                    pixels[..., label] += 100
                    Image.fromarray(pixels.astype(np.uint8)).save(root / "data" / folder / part / name / f"{i}.jpg")
    shutil.copy(root / "data" / "pets" / "val" / "dog" / "0.jpg", root / "photo.jpg")


def fill_hub_cache(cache: Path) -> None:
    """Put random weights where the hub's client looks for those that it has fetched before."""
    torch.manual_seed(0)
    name = timm.models.get_pretrained_cfg(MODEL).hf_hub_id.replace("/", "--")
    snapshot = cache / f"models--{name}" / "snapshots" / _COMMIT
    (cache / f"models--{name}" / "refs").mkdir(parents=True)
    (cache / f"models--{name}" / "refs" / "main").write_text(_COMMIT)
    snapshot.mkdir(parents=True)
    save_file(timm.create_model(MODEL).state_dict(), snapshot / "model.safetensors")


@dataclass
class Newcomer:
    """Runs blocks in ``root``, which is the current folder, where ``demo`` has what `vtk demo` printed."""

    root: Path
    demo: str

    def run(self, language: str, text: str) -> None:
        """Run a block, or compare a shown output with the true one; any other block is an error."""
        if language == "python":
            exec(compile(text, "README.md", "exec"), {})
        elif language == "text":
            self.compare(text)
        else:
            for line in lines(text):
                RUNNERS[line[0]](self, line)

    def vtk(self, line: list[str]) -> None:
        """Run a command; the demo has run already, for a shown output and for the pages of the guides."""
        code = 0 if line == ["vtk", "demo"] and "done in" in self.demo else main(line[1:])
        assert code == 0, f"{shlex.join(line)}: exit code {code}"

    def pip(self, line: list[str]) -> None:
        """Install a copy of this repository in a new environment, which sees the packages installed here."""
        assert line == ["pip", "install", "."], f"no test runs {shlex.join(line)}"
        copy, env = self.root / "clone", self.root / "env"
        for name in ("vtk", "kernels", "export"):
            shutil.copytree(REPO / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(REPO / name, copy)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
        python = env / "bin" / "python"
        purelib = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        site = Path(subprocess.run(purelib, check=True, capture_output=True, text=True).stdout.strip())
        (site / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
        offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | offline
        done = subprocess.run(
            [str(python), "-m", *line], cwd=copy, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        said = subprocess.run([str(env / "bin" / "vtk"), "--help"], env=variables, capture_output=True, check=False)
        assert said.returncode == 0 and (site / "vtk" / "__init__.py").is_file(), said.stderr[-2000:]

    def compare(self, shown: str) -> None:
        """Find the rows of a shown table in the demo's output, as alike as another processor makes them."""
        head, *rows = table(shown)
        printed = table(self.demo)
        assert head in printed and rows, f"the demo prints no table with the columns {head}"
        for row in rows:
            same = [other for other in printed if other[0] == row[0] and len(other) == len(row)]
            assert same, f"the demo prints no row {row}"
            for column, before, after in zip(head, row, same[-1], strict=True):
                assert alike(column, before, after), f"README shows {row}, the demo prints {same[-1]}"


def alike(column: str, before: str, after: str) -> bool:
    """Compare cells: accuracies to four points, sizes to 2 % (a card has dates and scores in it), all else exactly."""
    was, now = before.partition(" "), after.partition(" ")
    if column == "top-1":
        return abs(float(was[0]) - float(now[0])) <= 4.0
    if column == "on disk":
        return was[2] == now[2] and abs(float(was[0]) / float(now[0]) - 1) <= 0.02
    return before == after


RUNNERS: dict[str, Callable[[Newcomer, list[str]], None]] = {"vtk": Newcomer.vtk, "pip": Newcomer.pip}
"""By a line's first word; a line of another kind has no test yet."""
