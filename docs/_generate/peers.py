"""Writes docs/reference/tools.md from the records of `make test-peers`; ``--check`` compares it.

Usage: python docs/_generate/peers.py [--check]

A row of the table is there because its test passed. With ``--check``, a test of `tests/peers` that records something
must have rows, and rows must have their test.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _pages import write_or_check

REPO = Path(__file__).resolve().parents[2]
PAGE = REPO / "docs" / "reference" / "tools.md"
TESTS = REPO / "tests" / "peers"
RECORDS = TESTS / "records.json"
MARK = "record"
"""Fixture by whose name a test is recognised as one that leaves rows."""

OUTCOMES = {"run": "run", "converted": "converted only", "checked": "accepted"}
UNTRIED = {
    "Core ML on macOS and iOS": "what `coremltools` makes is only read back; a Mac runs it",
    "onnxruntime-web in a browser": "its WebAssembly runs in Node here; WebGPU and WebNN need a browser",
    "LiteRT on Android": "the same interpreter runs on Linux; delegates of phones do not",
    "ONNX Runtime on DirectML, CoreML, QNN": "other providers of the same run time",
    "the hub itself": "a stand-in on this machine answers timm's and transformers' own clients",
}
"""What nobody tried, and why."""

HEAD = """# Other tools

Written by `make docs` from what the tests of `make test-peers` recorded; do not edit by hand. Each row is a test that
passed: the tool runs in an environment without vtk, on a file that vtk wrote. *Run*: its outputs were compared.
*Converted only*: its result was read back, inputs, outputs and operators were compared, and nothing here can run it.
*Accepted*: a checker of files found nothing.
The difference is the largest one of the logits, as a share of the largest logit: of a conversion from the file it was
made of, else from PyTorch, or from ONNX Runtime on the same file. Files of half precision and int8 round in another
order everywhere.

How the files are made: [export](../guides/export.md), [merged models](../guides/tasks.md),
[adapters](../guides/peft.md), [the hub](../guides/hub.md).

| tool | version | file of vtk | result | difference |
| --- | --- | --- | --- | --- |
"""

NOT_TRIED = """
## Not tried

| what | why |
| --- | --- |
"""


def rows(records: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Yield the lines of the table: files of one tool, version and result share what is common to their names."""
    groups: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for found in records.values():
        for row in found:
            name = row["file"].partition(": ")[0]
            groups.setdefault((row["tool"], row["version"], row["outcome"], name), []).append(row)
    for (tool, version, outcome, name), found in sorted(groups.items(), key=lambda item: (item[0][0].lower(), item[0])):
        kinds = sorted({row["file"].partition(": ")[2] for row in found} - {""}, key=str.lower)
        file = f"{name}: {', '.join(kinds)}" if kinds else name
        known = [row["difference"] for row in found if row["difference"] is not None]
        yield f"| {tool} | {version} | {file} | {OUTCOMES[outcome]} | {shown(max(known)) if known else ''} |"


def shown(difference: float) -> str:
    """Return a bound of a difference in one digit: rounding differs from run to run."""
    if difference == 0:
        return "0"
    exponent = 0
    while difference > 10**exponent:
        exponent += 1
    while exponent > -16 and difference <= 10 ** (exponent - 1):
        exponent -= 1
    return f"≤ 1e{exponent}"


def recording() -> set[str]:
    """Return ``FILE::TEST`` of every test that takes the fixture."""
    return {
        f"tests/peers/{file.name}::{node.name}"
        for file in sorted(TESTS.glob("test_*.py"))
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and MARK in {argument.arg for argument in node.args.args}
    }


def faults(records: dict[str, Any]) -> list[str]:
    """Return what records and tests lack of each other."""
    kept, wanted = {test.partition("[")[0] for test in records}, recording()
    lines = [f"{test} has recorded nothing; run `make test-peers`" for test in sorted(wanted - kept)]
    return lines + [
        f"{test} is in {RECORDS.name} and is no test; run `make test-peers`" for test in sorted(kept - wanted)
    ]


def main() -> int:
    """Write or compare the page; return an exit code."""
    records = json.loads(RECORDS.read_text("utf-8"))
    if "--check" in sys.argv[1:] and (found := faults(records)):
        print("\n".join(found), file=sys.stderr)
        return 1
    untried = "".join(f"| {what} | {why} |\n" for what, why in UNTRIED.items())
    text = HEAD + "".join(f"{line}\n" for line in rows(records)) + NOT_TRIED + untried
    return write_or_check(PAGE, text, "the records of tests/peers")


if __name__ == "__main__":
    sys.exit(main())
