"""Tasks that are added to a model in the repository, replaced and removed, while the others stay."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.export.triton.test_models import further
from vtk.__main__ import main
from vtk_export.triton import bank_packs, export
from vtk_export.triton.config import TritonConfig
from vtk_export.triton.export import export_triton
from vtk_export.triton.pbtxt import read_text

Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return what runs the command on the model `m`: its result, or its exit code and message."""

    def command(*words: str | Path, name: str = "m") -> Any:
        argv = ["export", "triton", "--backend", "vtk", *map(str, words), "--name", name]
        code = main([*argv, "--out", str(tmp_path / "models"), "--json"])
        out, err = capsys.readouterr()
        return (code, err) if code else json.loads(out)["models"][0]

    return command


def entries(repo: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((repo / "m" / "1" / "tasks.json").read_text())["tasks"]
    return found


def test_an_update_adds_replaces_and_removes_tasks_and_keeps_the_others(packed: Any, tmp_path: Path, run: Run) -> None:
    repo, other = tmp_path / "models", further(packed, tmp_path / "other")
    run(f"p={packed.path}", f"q={packed.path}", f"r={packed.path}")
    before = entries(repo)
    made = run(f"q={other}", f"s={other}", "--update", "--remove", "p")
    assert (made["version"], made["updated"], made["tasks"]) == (1, True, ["q", "r", "s"])
    after = entries(repo)
    assert after["r"] == before["r"] and after["q"]["digest"] == after["s"]["digest"] != before["q"]["digest"]
    assert sorted(path.name for path in (repo / "m" / "1" / "packs").iterdir()) == ["q", "r", "s"]
    assert list(json.loads((repo / "m" / "client.json").read_text())["tasks"]) == ["q", "r", "s"]
    assert run("--remove", "r")["tasks"] == ["q", "s"]


def test_an_update_keeps_the_names_of_inputs_and_outputs(packed: Any, tmp_path: Path, run: Run) -> None:
    run(f"p={packed.path}", "--input-name", "x", "--output-name", "label=kind", "--with-preproc")
    changed = run(f"q={packed.path}", "--update", "--with-preproc")
    assert (changed["version"], changed["updated"]) == (1, True)
    message = read_text((tmp_path / "models" / "m" / "config.pbtxt").read_text())
    assert [entry.name for entry in (*message.input, *message.output)] == [
        "encoded", "x", "task", "logits", "kind", "score",
    ]  # fmt: skip


def test_only_what_is_new_and_a_few_others_are_compared_again(
    packed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = bank_packs.load_task
    monkeypatch.setattr(bank_packs, "load_task", lambda path, **k: (loaded.append(Path(path).name), load(path, **k))[1])
    config = TritonConfig(out=tmp_path / "models", backend="vtk", name="m")
    many = dict.fromkeys("abcde", packed.path)
    export_triton(many, config, show=False)
    assert len(loaded) == 5
    loaded.clear()
    new = further(packed, tmp_path / "new")
    export_triton({**many, "d": new}, config, show=False)
    assert len(loaded) == 4 and loaded.count("new") == 1
    (tmp_path / "models" / "m" / "1" / "vtk_rows.py").write_text("# of another release")
    loaded.clear()
    export_triton({**many, "d": new}, config, show=False)
    assert len(loaded) == 5


def test_two_updates_at_once_do_not_undo_each_other(
    packed: Any, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one ends before the first may write."""
    run(f"p={packed.path}")
    config = TritonConfig(out=tmp_path / "models", backend="vtk", name="m", update=True)
    opened, waiting = export.draft, [{"q": packed.path}]

    def late(*args: Any) -> Any:
        if waiting:
            export_triton(waiting.pop(), config, show=False)
        return opened(*args)

    monkeypatch.setattr(export, "draft", late)
    assert run(f"r={packed.path}", "--update")["tasks"] == ["p", "q", "r"]


@pytest.mark.parametrize(
    "words,said",
    [
        (["--remove", "x"], "m has no such task; it has p"),
        (["--remove", "p"], "leaves no task of m"),
        (["p=PACK", "--remove", "p"], "is among the sources, too"),
        (["q=PACK", "--update", "--name", "n"], "has no model n to update"),
        (["q=PACK", "--update", "--backend", "onnxruntime"], "has a model for each"),
        (["--update"], "no sources"),
    ],
)
def test_an_update_that_cannot_be_is_refused_in_one_line(
    packed: Any, tmp_path: Path, run: Run, words: list[str], said: str
) -> None:
    run(f"p={packed.path}")
    before = entries(tmp_path / "models")
    words = [word.replace("PACK", str(packed.path)) for word in words]
    name = words.pop(words.index("--name") + 1) if "--name" in words else "m"
    code, message = run(*[word for word in words if word != "--name"], name=name)
    assert code == 2 and said in message and message.count("\n") == 1, message
    assert entries(tmp_path / "models") == before
