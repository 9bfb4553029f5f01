"""docs/reference/tools.md says what the records of the peers' tests say, and these are of tests that are there."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

GENERATE = Path(__file__).resolve().parents[2] / "docs" / "_generate"


@pytest.fixture(scope="module")
def peers() -> Any:
    """The generator of the page, which stands beside the modules that it imports."""
    spec = importlib.util.spec_from_file_location("vtk_docs_peers", GENERATE / "peers.py")
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(GENERATE))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(GENERATE))
    return module


def row(file: str, difference: float | None = None, **values: str) -> dict[str, Any]:
    return {"tool": "X", "version": "1", "file": file, "outcome": "run", "difference": difference} | values


def test_every_recording_test_has_rows_and_every_row_a_test(peers: Any) -> None:
    records = json.loads(peers.RECORDS.read_text("utf-8"))
    assert len(peers.recording()) > 5 and peers.faults(records) == []
    gone = next(iter(records))
    assert any(gone.partition("[")[0] in fault for fault in peers.faults({"tests/peers/test_files.py::test_gone": []}))
    assert any("is no test" in fault for fault in peers.faults(records | {"tests/peers/test_files.py::test_gone": []}))


def test_rows_of_one_tool_and_result_share_a_line(peers: Any) -> None:
    records = {
        "a": [row("file: one", 2e-7), row("other")], "b": [row("file: Two", 5e-3)],
        "c": [row("file: three", outcome="converted")], "d": [row("file: four", 0.0, version="2")],
    }  # fmt: skip
    assert list(peers.rows(records)) == [
        "| X | 1 | file: three | converted only |  |",
        "| X | 1 | file: one, Two | run | ≤ 1e-2 |",
        "| X | 1 | other | run |  |",
        "| X | 2 | file: four | run | 0 |",
    ]


@pytest.mark.parametrize(
    ("difference", "text"), [(2e-7, "≤ 1e-6"), (1e-6, "≤ 1e-6"), (0.4, "≤ 1e0"), (1.0, "≤ 1e0"), (3.0, "≤ 1e1")]
)
def test_a_difference_is_shown_as_its_bound(peers: Any, difference: float, text: str) -> None:
    assert peers.shown(difference) == text


def test_the_page_is_what_the_records_say(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["peers.py", "--check"])
    assert peers.main() == 0
