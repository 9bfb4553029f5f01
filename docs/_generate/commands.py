"""Writes docs/reference/commands.md from the command line's own help; ``--check`` says whether it is up to date.

Usage: python docs/_generate/commands.py [--check]
"""

import subprocess
import sys
from pathlib import Path

from _pages import write_or_check

PAGE = Path(__file__).parents[1] / "reference" / "commands.md"
COMMANDS = (
    "", "finetune", "train", "pretrain", "eval", "predict", "embed", "data audit", "tasks list", "tasks diff",
    "tasks merge", "tasks bench", "tasks compress", "tasks calibrate", "tasks convert", "tasks bundle",
    "tasks to-peft", "tasks from-peft", "tasks push", "tasks pull",
    "parallelize", "export onnx", "export openvino", "export aoti", "export tasks", "export triton",
    "export tensorrt", "profile", "profile --server", "analyze", "doctor", "demo",
)  # fmt: skip
HEAD = """# Commands

Written by `make docs` from `vtk … --help-all`; do not edit by hand.
"""


def help_text(command: str) -> str:
    """Return a command's help with all its options."""
    words = [*command.split(), "--help-all"] if command else ["--help"]
    run = subprocess.run([sys.executable, "-m", "vtk", *words], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for command in COMMANDS:
        parts.append(f"## vtk {command}".rstrip() + f"\n\n```text\n{help_text(command)}\n```\n")
    return "\n".join(parts)


def main() -> int:
    """Write the page, or compare it."""
    return write_or_check(PAGE, page(), "the help texts")


if __name__ == "__main__":
    sys.exit(main())
