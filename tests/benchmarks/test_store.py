"""Results survive a cut: what is there is not measured again, what is torn or of other code is."""

import csv

import pytest
from _store import Deadline, Store, finish

KEY = ("model", "batch")


def store(path, code, **changes):
    return Store(path, KEY, lambda: {**code, **changes})


def test_a_row_counts_for_its_own_key_only(tmp_path, code):
    found = store(tmp_path / "a.csv", code)
    found.add({"model": "a", "batch": 1, "ms": 2.5})
    assert found.has(model="a", batch=1) and not found.has(model="a", batch=2)
    again = store(tmp_path / "a.csv", code)
    assert again.has(model="a", batch=1) and again.find(model="a", batch=1)["ms"] == "2.5"
    with pytest.raises(ValueError, match="the key is"):
        found.has(model="a")


@pytest.mark.parametrize("column", ["device", "torch", "triton", "git"])
def test_a_row_of_another_device_version_or_commit_does_not_count(tmp_path, code, column):
    store(tmp_path / "a.csv", code).add({"model": "a", "batch": 1, "ms": 2})
    other = store(tmp_path / "a.csv", code, **{column: "other"})
    assert not other.has(model="a", batch=1) and not other.current()
    assert store(tmp_path / "a.csv", code, date="later").has(model="a", batch=1)


def test_a_failed_row_is_measured_again_and_the_later_row_counts(tmp_path, code):
    found = store(tmp_path / "a.csv", code)
    found.add({"model": "a", "batch": 1, "passed": False})
    assert not found.has(model="a", batch=1)
    found.add({"model": "a", "batch": 1, "passed": True})
    assert found.has(model="a", batch=1)
    assert [row["passed"] for row in found.current()] == ["True"]


def test_a_row_torn_by_a_kill_is_dropped(tmp_path, code):
    path = tmp_path / "a.csv"
    found = store(path, code)
    for batch in (1, 2):
        found.add({"model": "a", "batch": batch, "ms": 2})
    path.write_bytes(path.read_bytes()[:-9])
    again = store(path, code)
    assert again.has(model="a", batch=1) and not again.has(model="a", batch=2)
    again.add({"model": "a", "batch": 2, "ms": 3})
    with path.open(newline="") as file:
        assert [(row["batch"], row["ms"]) for row in csv.DictReader(file)] == [("1", "2"), ("2", "3")]


def test_a_header_torn_by_a_kill_is_dropped(tmp_path, code):
    path = tmp_path / "a.csv"
    path.write_text("model,bat")
    store(path, code).add({"model": "a", "batch": 1})
    assert store(path, code).has(model="a", batch=1)


def test_a_deadline_notes_what_it_left_out(capsys):
    now = [0.0]
    deadline = Deadline(10, clock=lambda: now[0])
    assert deadline.allows(9, "first")
    now[0] = 5.0
    assert not deadline.allows(6, "slow") and deadline.allows(4, "quick")
    assert finish("stage", deadline, []) == 3
    assert "1 missing" in (text := capsys.readouterr().out) and "slow" in text and "quick" not in text
    assert finish("stage", deadline, ["wrong"]) == 1
    assert finish("stage", Deadline(1), []) == 0
