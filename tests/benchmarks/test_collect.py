"""Rows of a run join those of earlier ones, so that nothing measured is lost and the cost model keeps what it fits."""

import shutil

import _fit
import _rows
import collect
import e2e
from _sources import current
from _store import Store, read


def test_rows_of_a_run_join_those_of_earlier_ones(tmp_path, code, capsys):
    results, out = tmp_path / "results", tmp_path / "out"
    results.mkdir()
    for name in ("gpu_e2e.csv", "gpu_breakdown.csv", "gpu_ceilings.csv"):
        shutil.copy(_rows.RESULTS / name, results / name)
    before = read(results / "gpu_e2e.csv")
    store = Store(out / "gpu_e2e.csv", e2e.KEY, lambda: code)
    store.add({name: "1" for name in before[0] if name not in (*code, "code")} | {"provider": "fused"})
    argv = [str(out), "--results", str(results)]
    assert collect.main(argv) == 0 and "gpu_e2e.csv: 1 new rows" in capsys.readouterr().out
    rows = read(results / "gpu_e2e.csv")
    assert [{k: v for k, v in row.items() if k != "code"} for row in rows[:-1]] == before
    assert rows[-1]["code"] == current("fused") and {row["code"] for row in rows[:-1]} == {""}
    assert _fit.load(results) == _fit.load(_rows.RESULTS)
    text = (results / "gpu_e2e.csv").read_text()
    assert collect.main(argv) == 0 and "gpu_e2e.csv: 0 new rows" in capsys.readouterr().out
    assert (results / "gpu_e2e.csv").read_text() == text


def test_what_is_no_run_is_refused_and_nothing_of_it_is_taken(tmp_path, capsys):
    (tmp_path / "gpu_e2e.csv").write_text("model,device,torch,git,date\na,b,c\n")
    assert collect.main([str(tmp_path), "--results", str(tmp_path / "results")]) == 1
    assert collect.main([str(tmp_path / "none")]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "is not whole" in first and "holds no gpu_*.csv" in second and not (tmp_path / "results").exists()
