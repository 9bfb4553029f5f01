"""Draws docs/images/layers.svg and data-flow.svg; ``--check`` says whether they are up to date.

Usage: python docs/_generate/architecture.py [--check]

The layers are those of the import contract in pyproject.toml, which ``lint-imports`` holds the code to: the picture
shows no other.
"""

import sys
import tomllib
from pathlib import Path

from _pages import write_or_check
from _svg import LINE, MARGIN, WIDTH, arrow, note, picture, row

REPO = Path(__file__).resolve().parents[2]
IMAGES = REPO / "docs" / "images"
ROOMS = {
    "vtk.serving": ("vtk.bank in version 0.1", 0),
    "vtk.tasks": ("vtk.packs in version 0.1", 0),
    "vtk.__main__": ("the vtk command: subcommands, exit codes", 0),
    "vtk.commands": ("a module for each subcommand: flags → config → function", 0),
    "vtk.profiling": ("latency and memory", 1),
    "vtk.branches": ("parallel branches", 1),
    "vtk.analysis": ("measures, report", 1),
    "vtk.answers": ("evaluate, predict", 1),
    "vtk_export": ("ONNX, AOTInductor, TensorRT, Triton repositories", 1),
    "vtk.runtime": ("opens models; runs them on one of the back-ends", 2),
    "vtk.bank": ("many packs on one base in one process", 2),
    "vtk.fused": ("folded models for inference, CUDA graphs", 2),
    "vtk.training": ("one engine: fine-tune, train, pre-train", 3),
    "vtk.packs": ("a task's own weights: save, load, compare, merge", 3),
    "vtk.evaluation": ("metrics", 3),
    "vtk.data": ("audit, split, decoding, transforms, loaders", 3),
    "vtk.models": ("timm models, base weights, architecture transforms", 3),
    "vtk_kernels": ("Triton kernels; need torch and Triton alone", 4),
}
"""What each room does, and its colour."""
FOUNDATIONS = ("Small modules, highest first", 0)
"""Title and colour of the box that lists the layers of which nothing is said above."""


def layers() -> list[list[str]]:
    """Return the layers of the import contract from the highest; those of one layer do not know one another."""
    with (REPO / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (contract,) = [c for c in contracts if c["type"] == "layers"]
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def wrapped(names: list[str], most: int = 56) -> list[tuple[str, str]]:
    """Return names as lines of text."""
    lines = [""]
    for name in names:
        if len(lines[-1]) + len(name) > most:
            lines.append("")
        lines[-1] += f"{name}, "
    return [("small", line.rstrip(", ") if line is lines[-1] else line.rstrip()) for line in lines]


def layers_picture() -> str:
    """Return the layers as a picture."""
    parts, y, left, small = [], MARGIN + 24.0, MARGIN + 22, []
    parts.append(note(MARGIN, MARGIN + 12, "A layer imports from those below it.", "name"))
    for names in layers():
        if not set(names) & set(ROOMS):
            small += [name.removeprefix("vtk.") for name in names]
            continue
        if small:
            drawn, height = row(y, [[("name", FOUNDATIONS[0]), *wrapped(small)]], FOUNDATIONS[1], left)
            parts.append(drawn)
            y, small = y + height + 7, []
        for i in range(0, len(names), 2):
            pair = names[i : i + 2]
            texts = [[("name", name), ("small", ROOMS[name][0])] for name in pair]
            drawn, height = row(y, texts, ROOMS[pair[0]][1], left)
            parts.append(drawn)
            y += height + 7
    parts.append(arrow(MARGIN + 7, MARGIN + 26, y - MARGIN - 34))
    return picture(parts, y + MARGIN - 7, "Layers of the toolkit: " + ", ".join(" | ".join(n) for n in layers()))


STEPS = (
    ("", [["Images", "a folder for each class, or a table"]], 0),
    ("vtk data audit", [["Training images"], ["Held-out images"]], 3),
    (
        "vtk finetune, train, pretrain",
        [["Base", "weights that tasks share"], ["Pack and card", "what the task changes"]],
        3,
    ),
    (
        "",
        [
            ["Bank", "many packs,", "one base"],
            ["Fused model", "folded layers,", "CUDA graphs"],
            ["vtk export", "verified", "files"],
        ],
        2,
    ),
    (
        "",
        [
            ["Your process", "in Python"],
            ["Other runtimes", "ONNX Runtime,", "TensorRT, AOTI"],
            ["Server", "Triton Inference", "Server"],
        ],
        1,
    ),
)
"""The way of the data: the command that leads to a row, and the row's boxes."""


JUDGES = (
    "vtk eval, predict, analyze, profile",
    "open a pack, a fused model or an exported file,",
    "on the images that the run held out",
)
"""The box below: the commands that look at any of these models."""


def flow_picture() -> str:
    """Return the way from images to a server as a picture."""
    parts, y = [], float(MARGIN)
    for i, (command, boxes, fill) in enumerate(STEPS):
        if i:
            parts.append(arrow(WIDTH / 3, y + 4, 30))
            parts.append(note(WIDTH / 3 + 14, y + 24, command, "name"))
            y += 38
        texts = [[("name mid", lines[0]), *(("small mid", line) for line in lines[1:])] for lines in boxes]
        drawn, height = row(y, texts, fill)
        parts.append(drawn)
        y += height
    y += 14
    parts.append(row(y, [[("name mid", JUDGES[0]), *(("small mid", line) for line in JUDGES[1:])]], 4)[0])
    return picture(parts, y + 3 * LINE + 14 + MARGIN, "From images to a server")


def main() -> int:
    """Write both pictures, or compare them."""
    source = "the import contract and docs/_generate/architecture.py"
    pictures = {"layers.svg": layers_picture(), "data-flow.svg": flow_picture()}
    return max(write_or_check(IMAGES / name, text, source) for name, text in pictures.items())


if __name__ == "__main__":
    sys.exit(main())
