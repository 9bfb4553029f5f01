"""Rows know the code that they timed: what changes it, what does not, and that documents need no history for it."""

import csv
import subprocess

import _rows
import _sources
import performance
import pytest
from _sources import MODELS, commit, current, digest, record, recorded, state_of, subject_of, tree
from _store import Store

KERNELS, FUSED = "kernels/vtk_kernels", "vtk/fused"
FILES = {
    f"{KERNELS}/norm.py": "from vtk_kernels._rows import rows\nfrom vtk_kernels.choices import choose\n",
    f"{KERNELS}/_rows.py": "import torch\n",
    f"{KERNELS}/linear.py": "from vtk_kernels import _rows\n",
    f"{KERNELS}/add_norm.py": "x = 1\n",
    f"{KERNELS}/choices.py": "a = 1\n",
    f"{KERNELS}/choices.json": "{}\n",
    f"{FUSED}/model.py": "m = 1\n",
    "benchmarks/bench_linear.py": "from vtk_kernels.linear import linear\nfrom vtk_kernels.add_norm import add_norm\n",
    "docs/page.md": "words\n",
}


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def repo(tmp_path):
    """A repository of a few kernels; returns what commits a change and says which commit it is."""

    def git(*args):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def change(**files):
        write(tmp_path, files or FILES)
        git("add", "-A")
        git("commit", "-qm", "a change")
        return git("rev-parse", "--short", "HEAD")

    git("init", "-q")
    change.root = tmp_path
    return change


SUBJECTS = ("norm", "linear", "add_norm", MODELS)


@pytest.mark.parametrize(("file", "older"), [
    (f"{KERNELS}/norm.py", {"norm", MODELS}), (f"{KERNELS}/_rows.py", {"norm", "linear", MODELS}),
    (f"{KERNELS}/add_norm.py", {"linear", "add_norm", MODELS}),  # the benchmark of linear calls it beside
    (f"{FUSED}/model.py", {MODELS}), (f"{KERNELS}/choices.py", set()), (f"{KERNELS}/choices.json", set()),
    ("docs/page.md", set()), ("benchmarks/e2e.py", set()), (f"{KERNELS}/new.py", {MODELS}),
])  # fmt: skip
def test_a_change_makes_rows_stale_of_what_it_is_part_of(tmp_path, file, older):
    write(tmp_path, FILES)
    first = {s: digest(s, tree(tmp_path)) for s in SUBJECTS}
    write(tmp_path, {file: "changed = 1\n"})
    now = {s: digest(s, tree(tmp_path)) for s in SUBJECTS}
    assert {s for s in SUBJECTS if now[s] != first[s]} == older


def test_a_commit_and_its_files_have_one_digest(repo):
    first = repo()
    then = {s: digest(s, tree(repo.root)) for s in SUBJECTS}
    second = repo(**{f"{KERNELS}/_rows.py": "import torch, math\n"})
    assert {s: digest(s, commit(first, repo.root)) for s in SUBJECTS} == then
    assert digest("norm", commit(second, repo.root)) == digest("norm", tree(repo.root)) != then["norm"]
    assert len(set(then.values())) == len(SUBJECTS)
    for unknown in ("0000000", f"{first}+changes", "unknown", "", "--help", "HEAD"):
        assert commit(unknown, repo.root) is None


def row(file, **changes):
    made = {"op": "norm", "unit": "op norm", "provider": "vtk", "git": "abc1234", "code": ""}
    return made | changes


def test_what_a_row_is_about():
    assert subject_of("gpu_kernels.csv", row("")) == "norm"
    assert [subject_of("gpu_kernels.csv", row("", provider=p)) for p in ("eager", "grouped_mm", "compile")] == [
        None
    ] * 3
    assert subject_of("gpu_correct.csv", row("", unit="op linear")) == "linear"
    assert subject_of("gpu_correct.csv", row("", unit="model B/16")) == MODELS
    assert subject_of("gpu_correct.csv", row("", unit="pytest tests/a.py")) is None
    assert [subject_of("gpu_e2e.csv", row("", provider=p)) for p in ("fused", "folded+graph")] == [MODELS] * 2
    assert [subject_of("gpu_e2e.csv", row("", provider=p)) for p in ("timm", "timm+graph", "compile (blocks)")] == [
        None
    ] * 3
    assert subject_of("gpu_breakdown.csv", {"kernel": "gaps", "git": "a"}) == MODELS
    assert subject_of("gpu_ceilings.csv", {"what": "copy"}) is None and subject_of("engine.csv", {}) is None


def test_a_row_is_stale_by_its_own_digest_or_by_that_of_its_commit():
    known = {("abc1234", "norm"): "old", ("def5678", "norm"): "now"}

    def state(**changes):
        return state_of("gpu_kernels.csv", row("", **changes), known, lambda subject: "now")

    assert state() == "stale" and state(git="def5678") == "" and state(git="new") == "of unknown code"
    assert state(code="now") == "" and state(git="def5678", code="old") == "stale"  # what the row says itself counts
    assert state(provider="eager") == ""


def test_new_rows_carry_the_digest_and_older_files_go_on_without(tmp_path, code):
    rows = Store(tmp_path / "gpu_kernels.csv", ("op", "provider"), lambda: code)
    rows.add({"op": "norm", "provider": "vtk"})
    rows.add({"op": "norm", "provider": "eager"})
    assert [r["code"] for r in _rows.read(rows.path)] == [current("norm"), ""]
    assert state_of("gpu_kernels.csv", _rows.read(rows.path)[0], {}) == ""
    old = tmp_path / "gpu_e2e.csv"
    _rows.append(old, {"model": "a", "provider": "fused", **code})
    Store(old, ("model", "provider"), lambda: code).add({"model": "b", "provider": "fused"})
    assert [r["model"] for r in _rows.read(old)] == ["a", "b"] and "code" not in _rows.read(old)[1]
    assert Store(old, ("model", "provider"), lambda: code).has(model="b", provider="fused")


def results(folder, *rows):
    with (folder / "gpu_kernels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_the_history_is_asked_once_and_then_not_needed(repo, tmp_path):
    old = repo()
    new = repo(**{f"{KERNELS}/norm.py": "y = 2\n"})
    folder = tmp_path / "results"
    folder.mkdir()
    results(folder, row("", git=old), row("", git=new), row("", git="gone123"), row("", git=new, op="linear", code="x"))
    record(folder, lambda git: commit(git, repo.root))
    text = (folder / _sources.FILE).read_text()
    assert set(recorded(folder)) == {(old, "norm"), (new, "norm")}
    for later in (lambda git: None, lambda git: pytest.fail("asked") if git in (old, new) else None):
        record(folder, later)
        assert (folder / _sources.FILE).read_text() == text
    now = {"norm": digest("norm", tree(repo.root))}.get
    known = recorded(folder)
    assert [state_of("gpu_kernels.csv", row("", git=g), known, now) for g in (old, new)] == ["stale", ""]


RUN = {"device": "Card A", "torch": "2.11.0", "triton": "3.6.0", "date": "2026-01-01 10:00 UTC", "percent": ""}


def test_the_page_says_of_each_row_how_it_was_timed_of_which_commit_and_whether_it_is_stale(tmp_path):
    shape = {"mode": "forward", "dtype": "bf16"} | RUN
    mine = shape | {"op": "norm", "provider": "vtk", "git": "0123456"}
    eager = shape | row("", provider="eager", git="0123456")
    results(tmp_path, eager | {"shape": "B=1", "p50_us": "9", "timer": "launch"},
            mine | {"shape": "B=1", "p50_us": "3", "timer": "graph", "code": current("norm")},
            mine | {"shape": "B=2", "p50_us": "4", "timer": "launch", "code": "other"},
            mine | {"shape": "B=3", "p50_us": "5", "timer": "graph", "code": ""})  # fmt: skip
    page = performance.page(tmp_path)
    assert "| shape | mode | type | eager | vtk | commit |" in page
    assert "| B=1 | forward | bf16 | 9 *launch* | 3 | 0123456 |" in page
    assert "| B=2 | forward | bf16 | – | 4 *launch* | 0123456 *stale* |" in page
    assert "| B=3 | forward | bf16 | – | 5 | 0123456 *of unknown code* |" in page
    assert "1 of these 4 rows are *stale*." in page and "1 of these 4 rows are *of unknown code*." in page
    assert "2 rows are inside a graph, 2 are launches of the host." in page


def test_the_committed_results_say_what_they_timed_without_any_history():
    known = recorded(_rows.RESULTS)
    for file in _sources.TIMED:
        for found in _rows.read(_rows.RESULTS / file):
            subject = subject_of(file, found)
            assert subject is None or found.get("code") or (found["git"], subject) in known, (file, found)
