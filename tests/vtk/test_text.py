"""Text from others reaches terminals, pages, plots and Markdown as text: whatever it holds, nothing is obeyed."""

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.cells import cell_len

from vtk import console, html, markdown
from vtk.__main__ import entry, main
from vtk.text import in_plot, one_line, printable, printable_json, several_lines

HOSTILE = (
    r"\[/b]", "[/b]", "[b]", ":smile:", "\x1b[2J\x1b]0;title\x07", "\x1b[31mred", "\x9b31m", "a\rb", "\x08", "\ufeff",
    "\u202etxt.exe", "a\nvtk predict: error: b", "\u2066", "\u2028", "\udcff\udc80", "\x7f", "$\\frac{$", "_hidden",
    "<img src=x>", "```", "=1+1",
)  # fmt: skip


def harmless(text: str) -> bool:
    """Tell whether a terminal would do nothing but print lines of it."""
    return all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize("value", HOSTILE)
def test_a_text_is_shown_and_not_obeyed(value: str) -> None:
    assert harmless(printable(value)) and "\n" not in printable(value)
    assert printable(value) == value or "\\" in printable(value)
    assert printable(printable(value)) == printable(value) == one_line(value)
    assert harmless(several_lines(value)) and several_lines("a\n\tb") == "a\n        b"


def test_ordinary_names_stay_as_they_are() -> None:
    for name in ("katze", "Äpfel & Birnen", "猫", "кошка", "🐈", "[a]", r"C:\x", "50 %"):
        assert printable(name) == name


@pytest.mark.parametrize("value", HOSTILE)
def test_json_is_harmless_and_means_the_same(value: str) -> None:
    text = printable_json(json.dumps({"a": value}, ensure_ascii=False))
    assert harmless(text) and json.loads(text) == {"a": value}


@pytest.mark.parametrize("value", HOSTILE)
def test_what_is_printed_is_harmless(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    console.say(value, value)
    console.warn(value)
    console.complain(value)
    console.table(value, (value, "n"), [(value, 0.5), (Path(f"x{value}"), None)])
    with console.progress(value, 2) as bar:
        bar.advance(1, note=value)
    out, err = capsys.readouterr()
    assert harmless(out) and harmless(err)
    assert out.count(printable(value)) == 6 and err.count(printable(value)) == 2


@pytest.mark.parametrize("value", HOSTILE)
def test_on_a_terminal_only_our_own_colours_are_sent(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    console.say(value)
    console.table(value, (value, "a", "b"), [(value * 9, 0.5, value * 9)], left=(0, 2))
    with console.progress(value, 2) as bar:
        bar.advance(1, note=value)
    assert harmless(re.sub(r"\x1b\[[0-9;?]*[mhlKA]|\r", "", screen.getvalue()))


def test_a_path_is_not_broken_where_the_table_is_too_wide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a file the table is as wide as it has to be; on a terminal the path has a line of its own."""
    path, rest = "/data/" + "folder/" * 20 + "task", ("vit_small_patch16_224", 3)
    console.table("packs", ("pack", "model", "classes"), [(path, *rest)], left=(0, 1))
    title, head, row = capsys.readouterr().out.splitlines()
    assert row.split() == [path, *map(str, rest)] and head.index("model") == row.index("vit_") and title == "packs"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    console.table("packs", ("pack", "model", "classes"), [(path, *rest)], left=(0, 1))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert [line.split() for line in plain.splitlines()] == [
        ["packs"], ["pack"], ["model", "classes"], [path], ["vit_small_patch16_224", "3"],
    ]  # fmt: skip
    console.table("", ("image", "a", "b"), [(path, "x" * 60, "y" * 60)], left=(0, 1, 2))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "".join(plain.split()) == f"{path}a{'x' * 60}b{'y' * 60}"


def test_messages_of_other_libraries_are_harmless(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    before = logging.getLogRecordFactory()
    try:
        console.guard_messages()
        for value in HOSTILE:
            logging.getLogger("other").warning("cannot read %s", value)
            assert harmless(warnings.formatwarning(UserWarning(value), UserWarning, "f.py", 1))
        # one whose arguments do not fit is left to logging, which says so
        assert logging.getLogRecordFactory()("other", 30, "f.py", 1, "%s %s", (1,), None).args == (1,)
    finally:
        logging.setLogRecordFactory(before)
    assert len(caplog.records) == len(HOSTILE)
    assert all(harmless(record.getMessage()) for record in caplog.records)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of labels: two images of each hostile class that a table can name."""
    lines = ["path,label"]
    names = [name for name in HOSTILE if "\udcff" not in name and ";" not in name and name.strip() == name]
    for i, name in enumerate(names):
        for j in range(2):
            Image.fromarray(np.full((9, 9, 3), 10 * i + j, np.uint8)).save(tmp_path / f"{i}-{j}.png")
            lines.append(f'{i}-{j}.png,"{name}"')
    file = tmp_path / "t\x1b[2J.csv"
    file.write_bytes("\n".join(lines).encode())
    return file


def test_an_audit_of_hostile_classes_says_and_shows_them(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = table.parent / "page.html"
    assert main(["data", "audit", str(table), "--workers", "0", "--no-cache", "--out", str(page)]) == 0
    out, err = capsys.readouterr()
    assert harmless(out) and harmless(err) and r"\[/b]" in out and ":smile:" in out
    text = page.read_text(encoding="utf-8")
    assert harmless(text) and "<img src=x>" not in text and "&lt;img src=x&gt;" in text


def test_an_error_is_one_harmless_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for value in HOSTILE:
        for words in (["predict", f"{tmp_path}/{value}", "x"], ["data", value], [value], ["predict", f"--{value}"]):
            assert main(words) in (2, 3)
            err = capsys.readouterr().err
            assert harmless(err) and err.count("\n") == 1


def test_a_traceback_is_harmless(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(argv: list[str]) -> int:
        raise RuntimeError("bad \x1b[2J name")

    monkeypatch.setattr("vtk.commands.doctor.main", broken)
    monkeypatch.setattr(sys, "argv", ["vtk", "doctor"])
    for name in ("leave_current_folder", "console.guard_messages"):
        monkeypatch.setattr(f"vtk.__main__.{name}", lambda: None)
    with pytest.raises(SystemExit) as ended:
        entry()
    err = capsys.readouterr().err
    assert ended.value.code == 1 and harmless(err)
    assert err.startswith("Traceback") and err.endswith("RuntimeError: bad \\x1b[2J name\n")


@pytest.mark.parametrize("value", HOSTILE)
def test_pages_and_markdown_hold_text_as_text(value: str) -> None:
    assert html.text(value) == html.escape(printable(value))
    span = markdown.span(value)
    ticks = re.match("`+", span)
    assert ticks and span.endswith(ticks[0]) and span.count(ticks[0]) == 2 and harmless(span)
    assert harmless(markdown.quoted(value)) and json.loads(markdown.quoted("a")) == "a"


def test_plots_show_names_that_look_like_formulas(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    names = ("$\\frac{$", "$", "_hidden", "a\n$\x1b$")
    figure = Figure()
    axes = figure.add_subplot(title=in_plot(names[0]))
    for name in names:
        axes.plot([0, 1], label=in_plot(name))
    assert [text.get_text().replace("\\$", "$").strip("\u200b") for text in axes.legend().get_texts()] == [
        printable(name) for name in names
    ]
    figure.savefig(tmp_path / "a.png", dpi=20)


def test_an_adapters_readme_shows_hostile_names_as_text() -> None:
    from vtk.card import BaseRef, Card, InputSpec, ModelSpec
    from vtk.packs.peft_readme import readme
    from vtk.packs.plain import PlainCall

    card = Card(ModelSpec("m`\n# x"), InputSpec(8, 8), HOSTILE[:8], BaseRef("\x1b[2J`", "0"))
    text, _ = readme(card, PlainCall("m", {"a": "```\n# y"}), ["a`b\nc"], ["head"], with_base=False)
    assert harmless(text) and "\n# x" not in text and "\nvtk predict" not in text
    heads = [line for line in text.splitlines() if line.startswith("#")]
    assert heads[0].startswith("# A PEFT adapter for `") and all(head.startswith("## ") for head in heads[1:])


def test_an_adapter_without_its_base_says_how_a_hub_model_or_a_file_becomes_one(tmp_path: Path) -> None:
    from vtk.card import BaseRef, Card, InputSpec, ModelSpec
    from vtk.packs.peft_readme import readme
    from vtk.packs.plain import PlainCall

    def page(source: str) -> str:
        card = Card(ModelSpec("m"), InputSpec(8, 8), ("a", "b"), BaseRef(source, "0"))
        return readme(card, PlainCall("m", {}), [], ["head"], with_base=False)[0]

    assert "put `w.safetensors` beside it as base.safetensors, with timm's keys." in page("w.safetensors")
    text = page("hub:vit_x.augreg_in1k")
    line = (
        "`safetensors.torch.save_file(timm.create_model('vit_x.augreg_in1k', pretrained=True).state_dict(), "
        '"base.safetensors")`'
    )
    assert f"write those of the hub beside it by {line}, with timm's keys." in text and "put `hub:" not in text


def test_numbers_of_one_and_of_none_read_as_such() -> None:
    assert [console.count(n, "image") for n in (0, 1, 2, 1200)] == ["0 images", "1 image", "2 images", "1,200 images"]
    assert console.deviation("the pack's", 0.0) == "equal the pack's bit for bit"
    assert console.deviation("the pack's", 3.2e-7) == "differ from the pack's by at most 3e-07"


@pytest.mark.skipif(not hasattr(pty, "openpty"), reason="no terminals here")
def test_a_real_terminal_gets_nothing_of_a_name(table: Path) -> None:
    """The whole command on a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "80"}
    words = [sys.executable, "-m", "vtk", "data", "audit", str(table), "--workers", "0", "--no-cache"]
    with subprocess.Popen(words, stdout=theirs, stderr=theirs, stdin=theirs, env=env) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux says so where the other end is closed
                break
            if not part:
                break
            said += part
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[mhlKA]|\r", "", said.decode())
    assert process.returncode == 0 and harmless(text) and "t\\x1b[2J.csv" in text


def test_lines_on_a_terminal_end_between_words_and_paths_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/data/" + "folder/" * 20 + "x.png"
    for say in (console.say, console.warn):
        out = Terminal()
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", out)
        monkeypatch.setenv("COLUMNS", "80")
        say("猫 " * 30 + f"{path} is   read, and its neighbours too")
        lines = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()
        assert [line for line in lines if len(line) > 80] == [path]
        assert all(cell_len(line) <= 80 for line in lines if line != path)
        assert " ".join(lines).replace("warning: ", "") == "猫 " * 30 + f"{path} is   read, and its neighbours too"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
