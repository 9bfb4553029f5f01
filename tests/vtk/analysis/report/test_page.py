"""The report and the terminal: whole, escaped, self-contained, small; what differs between two is said."""

import io
import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from html import escape
from html.parser import HTMLParser

import pytest
from PIL import Image
from rich.cells import cell_len

from tests.vtk.analysis._fakes import analysis, fake
from vtk.analysis import figures
from vtk.analysis.diagnostics import NAMES
from vtk.analysis.diagnostics.base import Run
from vtk.analysis.report.page import page
from vtk.analysis.report.plot_files import embed
from vtk.analysis.report.summary import advice, cautions, difference, headline, number_text, suggests
from vtk.analysis.report.terminal import print_analyses

EVIL = "a\x1b[31m\n<script>alert(1)</script> & \"q\" 'x' \ud800"
TRY = "Attention is dense: try `vtk finetune … --cb upper`."


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    diagnostics = {name: fake(name) for name in NAMES}
    monkeypatch.setattr("vtk.analysis.report.page.embed", cache(embed))
    for module in ("page", "summary", "terminal"):
        monkeypatch.setattr(f"vtk.analysis.report.{module}.diagnostic", diagnostics.__getitem__)
    return diagnostics


class Page(HTMLParser):
    """Collects tags, attributes and text; complains of tags that are not closed and of ids that are twice."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)
        assert self.open == []
        ids = [a["id"] for _, a in self.tags if "id" in a]
        assert len(ids) == len(set(ids))
        assert {a["href"][1:] for tag, a in self.tags if tag == "a"} <= set(ids)  # every link leads somewhere

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def report(*analyses):
    """The page, every plot the same one."""
    pictures = {}
    for name in NAMES:
        labels = [one.label for one in analyses if name in one.results]
        if labels:
            pictures[name] = [(name, f"A line for each of {' and '.join(labels)}.", plot())]
    return page(analyses, pictures)


@cache
def plot():
    return figures.png(fake("entropy").draw([Run("a", {"value": 1.0}), Run("b", {"value": 2.0})])[0].figure)


def test_one_model_has_everything_in_order():
    one = analysis(
        results={"entropy": {"value": 1.5, "more": [TRY]}, "noise": {"value": 0.25}}, refused={"cka": "too few images"}
    )
    source = report(one)
    got = Page(source)
    order = [
        "Analysis of one", "Suggested changes", TRY.replace("`", ""), "Key numbers", "value, m", "Contents",
        "Attention",
        "The entropy", "paper Z, Figure 9", "High is much.", "A line for each of one.", "Reading", "It is 1.5.",
        "Robustness", "The noise", "Not measured", "too few images", "Run details", "vtk analyze x",
        "123.4 MB", "Seconds", "2.25",
    ]  # fmt: skip
    at = 0
    for words in order:
        assert words in got.text[at:], words
        at = got.text.index(words, at)
    assert got.count("figure") == got.count("img") == got.count("figcaption") == 2
    assert "cka" not in [a.get("id") for _, a in got.tags] and "B − A" not in got.text
    assert "It is 1.5." in got.text[: got.text.index("Key numbers")]  # the sentence that says why


def test_the_page_needs_nothing_beside_it_and_runs_nothing():
    got = Page(source := report(analysis()))
    assert not {"script", "link", "iframe", "object", "form"} & {tag for tag, _ in got.tags}
    for tag, attributes in got.tags:
        assert not any(name.startswith("on") for name in attributes)
        if tag == "img":
            assert attributes["src"].startswith("data:image/") and attributes["alt"]
            assert int(attributes["width"]) == 900
    assert not re.findall(r"https?:|@import|url\(", source)
    viewport = next(a for _, a in got.tags if a.get("name") == "viewport")
    assert viewport["content"] == "width=device-width, initial-scale=1"


def test_everything_from_outside_is_escaped(fakes):
    fakes["entropy"] = fake("entropy", numbers=lambda result: {f"of {EVIL}": 1.0}, read=lambda r: [f"Of `{EVIL}`."])
    one = analysis(EVIL, refused={"cka": EVIL, EVIL: "why"}, facts={"data": EVIL, "command": EVIL, EVIL: EVIL})
    two = replace(one, label=f"{EVIL}2", facts={**one.facts, "images": EVIL, "images digest": EVIL})
    for given in ((one,), (one, two)):
        source = report(*given)
        source.encode("utf-8")
        got = Page(source)
        assert got.count("script") == 0 and "\x1b" not in source
        assert r"a\x1b[31m\n<script>alert(1)</script> & " in got.text


def test_two_models_are_set_against_each_other():
    a = analysis("base", {"entropy": {"value": 1.5}, "noise": {"value": 3.0}}, refused={"cka": "too few"})
    b = analysis("tuned", {"noise": {"value": 2.5, "more": [TRY]}}, refused={"entropy": "no attention"})
    got = Page(report(a, b))
    cells = re.sub(r"\s+", " ", got.text)
    assert "base compared with tuned" in cells and "B − A" in cells
    assert "value, m1.5––" in cells and "value, m32.5−0.5" in cells
    assert "Only A has: The entropy." in cells and "Only B" not in cells
    assert "B has no result: no attention" in cells  # in its section
    assert "entropyB no attention" in cells and "ckaA too few" in cells  # in the list at the end
    assert got.count("figure") == 2 and "A line for each of base and tuned." in cells
    assert "No reading suggests a change." in cells and TRY.replace("`", "") in cells


def test_a_model_without_any_result_has_a_page():
    none = analysis(results={}, refused={"entropy": "no attention"})
    got = Page(report(none))
    assert "Nothing could be measured" in got.text and "no attention" in got.text and got.count("figure") == 0
    assert "no attention" in Page(report(none, none)).text


def test_plots_in_a_row_keep_their_size_on_a_phone():
    buffer = io.BytesIO()
    Image.new("RGB", (1800, 600), "white").save(buffer, format="PNG")
    drawn = {"entropy": [("entropy", "One.", plot()), ("entropy-2", "Two `x`.", buffer.getvalue())]}
    got = Page(source := page([analysis()], drawn))
    assert [a.get("class") for tag, a in got.tags if tag == "figure"] == [None, "wide"]
    assert [a.get("style") for tag, a in got.tags if tag == "img"] == [None, "--least:40rem"]
    assert source.count("<figcaption>") == 2 and "<code>x</code>" in source


def test_other_images_and_options_are_a_warning():
    a = analysis("a", {"entropy": {"value": 1}, "landscape": {"value": 1}, "cka": {"value": 1}})
    assert cautions([a]) == cautions([a, a]) == []
    b = replace(a, facts={**a.facts, "images digest": "other", "images": "9 of --split train"})
    (told,) = cautions([a, b])
    assert "different images" in told and "64 of --split val" in told and "9 of --split train" in told
    options = {"entropy": {"seed": 1}, "landscape": {"seed": 1, "grid": 5}, "cka": {"seed": 0}}
    told = cautions([a, replace(a, facts={**a.facts, "options": options})])
    assert len(told) == 2 and "`--seed` 0 and 1 (for entropy, landscape)" in told[0]
    assert "`--grid` unknown and 5 (for landscape)" in told[1]


def test_images_are_compared_part_by_part():
    def digests(found):
        return replace(analysis("m"), facts={**analysis("m").facts, "images digest": found})

    both = {"9 held-out": "abc", "4 training": "def"}
    for one, two, same in (
        (both, both, True), (both, {"9 held-out": "abc", "7 all": "x"}, True),
        (both, {**both, "4 training": "x"}, False),
        (both, {"8 held-out": "abd"}, False), (both, "abc", True), ("x", both, False),
    ):  # fmt: skip
        told = " ".join(cautions([digests(one), digests(two)]))
        assert ("different images" not in told) == same, (one, two)
    assert "9 held-out: abc; 4 training: def" in Page(report(digests(both))).text


def test_warnings_are_on_top_of_the_page():
    a = analysis("a")
    b = replace(a, label="b", facts={**a.facts, "images digest": "other"})
    got = Page(report(a, b))
    assert [attributes.get("class") for _, attributes in got.tags].count("warning") == 1
    assert got.text.index("different images") < got.text.index("Suggested changes")


@pytest.mark.parametrize(
    ("sentence", "is_one"),
    [
        (TRY, True), ("Those with registers, such as `--model vit_reg4`, less.", True), ("try `--cb=upper`", True),
        ("Give more with `--max-images` 2000.", False), ("See `vtk analyze --help`.", False), ("`‖w‖` is 3.", False),
        ("try --cb upper", False), ("``", False),
    ],
)  # fmt: skip
def test_what_suggests_a_change(sentence, is_one):
    assert suggests(sentence) is is_one


def test_advice_brings_the_reason_along():
    one = analysis(results={"cka": {"value": 1, "more": ["Middle.", "Because.", TRY, "After."]}, "noise": {"value": 2}})
    assert advice(one) == {"cka": f"Because. {TRY}"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0.0, "0"), (1.23456, "1.235"), (-0.5, "−0.5"), (12345.6, "12,346"), (1e-7, "1e−7"),
        (2.5e9, "2.5e9"), (99.999, "100"), (-4321098.0, "−4,321,098"), (64, "64"),
    ],
)  # fmt: skip
def test_numbers_are_written_with_four_digits(value, text):
    assert number_text(value) == text
    assert number_text(value, sign=True) == ("+" if value and value > 0 else "") + text


def test_what_is_not_defined_is_a_dash(fakes):
    values = {"nan": float("nan"), "inf": float("inf"), "none": None, "one": 1.0}
    fakes["cka"] = fake("cka", numbers=lambda result: values if result["value"] == 1 else {"one": 3.0, "new": 2.0})
    told = headline([analysis(results={"cka": {"value": 1}}), analysis(results={"cka": {"value": 2}})])["cka"]
    assert told == {
        "nan": [None, None], "inf": [None, None], "none": [None, None], "one": [1.0, 3.0], "new": [None, 2.0],
    }  # fmt: skip
    assert [difference(pair) for pair in told.values()] == [None, None, None, 2.0, None]


class Terminal:
    def __init__(self, monkeypatch, capsys, columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr("vtk.console._is_terminal", lambda: True)
        self.capsys = capsys

    def lines(self, *analyses):
        print_analyses(analyses)
        return [re.sub(r"\x1b\[[\d;]*m", "", line) for line in self.capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("columns", [80, 60, 200])
def test_no_line_is_wider_than_the_terminal(columns, monkeypatch, capsys, fakes):
    long = "A sentence of words that goes on and on, with 日本語の長い名前 in it, and a path " + "x" * 130 + "."
    fakes["cka"] = fake(
        "cka", title="A rather long title of a diagnostic that has many words in it, more than fit on a line",
        numbers=lambda result: {"a long name of a number that is told with its unit, 日本語 per image and head": 1e-5},
        read=lambda result: [long, TRY, long],
    )  # fmt: skip
    one = analysis("a model " * 20, {"entropy": {"value": -123456.7}, "cka": {}}, refused={"noise": long, EVIL: EVIL})
    two = replace(one, label="other", facts={**one.facts, "images digest": "x", "images": long})
    terminal = Terminal(monkeypatch, capsys, columns)
    for given in ((one,), (one, two)):
        lines = terminal.lines(*given)
        assert max(map(cell_len, lines)) <= min(columns, 80)
        text = " ".join(" ".join(lines).split())
        assert "−123,457" in text and "1e−5" in text and "Not measured" in text and "\x1b" not in text
        assert TRY in text and text.index("value, m") < text.rindex("Suggested changes")


def test_terminal_of_one_model_reads_and_of_two_compares(monkeypatch, capsys):
    terminal = Terminal(monkeypatch, capsys, 80)
    one = analysis("m", {"entropy": {"value": 1.5, "more": [TRY]}}, refused={"cka": "too few [bold]images"})
    text = "\n".join(terminal.lines(one))
    assert "It is 1.5." in text and "cka: too few [bold]images" in text and "B − A" not in text
    two = replace(one, label="n", results={"entropy": {"value": 2.0}, "noise": {"value": 1.0}}, refused={})
    lines = terminal.lines(one, two)
    assert "A: m" in lines and "B: n" in lines
    assert [line.split() for line in lines if "value, m" in line] == [
        ["value,", "m", "1.5", "2", "+0.5"], ["value,", "m", "–", "1", "–"],
    ]  # fmt: skip
    assert any("A, cka: too few" in line for line in lines)


def test_a_page_with_every_diagnostic_is_small():
    one = analysis(results={name: {"value": float(i)} for i, name in enumerate(NAMES)})
    got = report(one, replace(one, label="two"))
    assert len(got.encode()) < 5e6
    assert Page(got).count("section") == len(NAMES)


@pytest.mark.slow
def test_nothing_is_cut_off_on_a_phone(tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium here")
    results = {name: {"value": float(i), "more": [TRY]} for i, name in enumerate(NAMES[:4])}
    a = analysis(
        "vit_small_patch14_dinov2.lvd142m_with_a_very_long_name_of_a_run", results, refused={"cka": "no " * 40}
    )
    b = replace(a, facts={**a.facts, "images digest": "x" * 64, "command": "vtk analyze " + "x" * 300})
    measured = "document.documentElement.scrollWidth + ' of ' + document.documentElement.clientWidth"
    inside = report(a, b).replace("</body>", f"<script>parent.document.title = {measured}</script></body>")
    file = tmp_path / "frame.html"  # a window is at least 500 px wide, a frame as narrow as it is told
    frame = f'<iframe srcdoc="{escape(inside)}" style="width:360px;height:640px;border:0"></iframe>'
    file.write_text(f"<!doctype html><title></title>{frame}", encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=5000"]
    told = subprocess.run([browser, *options, file.as_uri()], check=True, capture_output=True, timeout=240)
    width, window = map(int, re.search(rb"<title>(\d+) of (\d+)</title>", told.stdout).groups())
    assert width == window and 340 <= window <= 360
