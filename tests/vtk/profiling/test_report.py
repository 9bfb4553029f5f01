import base64
import csv
import io
import json
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from rich.cells import cell_len

from vtk.errors import DataError
from vtk.formats import write_json
from vtk.profiling.cells import BackendResult, Cell
from vtk.profiling.plot import latency_png
from vtk.profiling.report import FILES, print_result, to_csv, write_reports
from vtk.profiling.result import ProfileResult
from vtk.profiling.rows import columns, values


def cell(batch: int, p50: float | None, p90: float | None = None, mean: float | None = None, **more) -> Cell:
    typical = mean or p50
    return Cell(
        batch, runs=120, p50_ms=p50, p90_ms=p90, mean_ms=typical, min_ms=typical,
        images_per_second=1000 * batch / typical, weight_bytes=1_000_000_000, activation_bytes=234_567_890,
        process_bytes=3_000_000_000, load_s=0.5, first_s=12.3,
        max_diff=1.5e-6, **more,
    )  # fmt: skip


def result(*backends: BackendResult, **more) -> ProfileResult:
    return ProfileResult(
        source="runs/<script>alert(1)</script>/task", kind="pack", model="vit_small_patch16_224",
        input_shape=(3, 224, 320), device="cpu", device_name="A CPU with a rather long name @ 2.60 GHz",
        precision="fp32", threads=4, duration_s=10.0, reference="torch fp32 on the CPU", inputs="32 images",
        order="ascending",
        memory="peak resident memory of the whole process", backends=backends, versions={"torch": "2.14"},
        command="vtk profile runs/pets/task", **more,
    )  # fmt: skip


EAGER = BackendResult("eager", provider="torch cpu", cells=(cell(1, 10, 12), cell(2, 15, 21), cell(8, 50)))
ORT = BackendResult(
    "ort-cpu", provider="CPUExecutionProvider", device="cpu", prepare_s=3.0,
    cells=(
        cell(1, 8, 9), cell(2, 14, 18), Cell(8, "oom", "out of memory: " + "word " * 40), Cell(16, "skipped", "not so"),
    ),
)  # fmt: skip
COMPILE = BackendResult("compile", provider="inductor cpu", compiles=True, cells=(cell(1, 7), cell(1024, 123456.7)))
ABSENT = BackendResult("ort-cuda", "unavailable", "torch sees no CUDA device; `vtk doctor` says why")
WRONG = BackendResult("ort-trt", cells=(Cell(1, "mismatch", "wrong output, not timed: differs by 3"),))
FULL = result(EAGER, COMPILE, ORT, ABSENT, budget_ms=20.0)


def test_budget_takes_p90_and_the_most_images_per_second() -> None:
    # batch 2 of eager has p50 15 but p90 21: it does not meet 20 ms
    line = FULL.budget
    assert line.startswith("budget 20 ms: batch 2 with ort-cpu meets it")
    assert "p90 18.00 ms" in line and "142.9 images/s" in line


def test_budget_falls_back_to_p50_and_says_so() -> None:
    assert "batch 8 with eager" in replace(FULL, budget_ms=60.0).budget
    assert "p50 50.00 ms" in replace(FULL, budget_ms=60.0).budget


def test_budget_that_none_meets_names_the_nearest() -> None:
    line = replace(FULL, budget_ms=1.0).budget
    assert "no measured batch size meets it" in line and "batch 1 with compile: p50 7.00 ms" in line


def test_cells_without_percentiles_are_not_judged_and_wrong_ones_are_not_counted() -> None:
    few = BackendResult("eager", cells=(cell(1, None, mean=5.0),))
    line = result(few, WRONG, budget_ms=20.0).budget
    assert "no batch size could be judged" in line and "not judged, fewer than 20 runs: eager batch 1" in line
    assert result(few).budget == ""


def test_latency_that_falls_with_the_batch_is_flagged_as_noise() -> None:
    noisy = BackendResult("eager", cells=(cell(1, 10), cell(2, 9), cell(4, 30)))
    (warning,) = result(noisy).warnings
    assert "batch 2 took 9.00 ms, less than batch 1 with 10.00 ms: noise" in warning
    assert FULL.warnings == ()


def test_exit_codes() -> None:
    assert FULL.exit_code == 0
    assert result(EAGER, WRONG).exit_code == 4
    assert result(EAGER, BackendResult("ort-cpu", "mismatch", "gate")).exit_code == 4
    assert result(ABSENT).exit_code == 1  # nothing was measured
    assert result(EAGER, BackendResult("x", cells=(Cell(1, "failed", "boom"),))).exit_code == 1


@pytest.mark.parametrize("width", ["80", "200"])
def test_tables_fit_80_columns(width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", width)
    print_result(FULL)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert "eager: torch cpu, load 0.50 s, max diff 1.5e-06" in lines
    (header,) = (line for line in lines if "compile s" in line and "batch" in line and "p99 ms" in line)
    row = next(line for line in lines if line.split()[:1] == ["1024"])
    assert row.split() == ["1024", "120", "123456.7", "–", "–", "8.29", "1.2", "GB", "3.0", "GB", "12.3"]
    ends = {"batch": "1024", "p50 ms": "123456.7", "counted": "1.2 GB", "process": "3.0 GB", "compile s": "12.3"}
    for name, end in ends.items():
        assert header.index(name) + len(name) == row.index(end) + len(end)  # numbers stand under their heading
    text = " ".join(" ".join(lines).split())
    assert "ort-cuda: unavailable: torch sees no CUDA device" in text and "out of memory: word word" in text


def test_names_with_hyphens_stay_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = "budget 5 ms: no measured batch size meets it; the nearest is batch 1 with ort-cpu: p99 8.94 ms"
    monkeypatch.setattr(ProfileResult, "budget", text)
    print_result(FULL)
    assert "  ort-cpu: p99 8.94 ms" in capsys.readouterr().out.splitlines()


def test_json_round_trip(tmp_path: Path) -> None:
    write_json(tmp_path / "profile.json", FULL.to_dict())
    assert ProfileResult.read(tmp_path / "profile.json") == FULL
    plain = json.loads((tmp_path / "profile.json").read_text())
    assert plain["schema"] == 3 and plain["budget"] == FULL.budget and plain["exit_code"] == 0
    assert plain["backends"][0]["cells"][1]["p90_ms"] == 21
    assert plain["backends"][0]["cells"][0]["activation_bytes"] == 234_567_890


@pytest.mark.parametrize(
    "text,said", [("[]", "not a profile"), ('{"schema": 99}', "newer"), ('{"schema": 1}', "missing")]
)
def test_json_of_something_else_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(DataError, match=said):
        ProfileResult.read(tmp_path / "profile.json")


def test_memory_of_an_allocator_is_shown_as_it_was_measured_and_old_files_as_they_were() -> None:
    measured = Cell(1, runs=120, p50_ms=5.0, mean_ms=5.0, images_per_second=200.0, peak_memory_bytes=64_000_000)
    backend = BackendResult("eager", cells=(measured,))
    assert columns(backend)[6:] == ["memory"] and values(backend, measured)[6] == "64.0 MB"
    unknown = replace(measured, peak_memory_bytes=None, weight_bytes=1, process_bytes=9_000_000)
    backend = BackendResult("x", cells=(unknown,))
    assert columns(backend)[6:] == ["counted", "process"] and values(backend, unknown)[6:] == ["–", "9.0 MB"]


def test_csv_has_a_row_for_every_cell_and_absent_backend() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(FULL))))
    assert [(r["backend"], r["batch"]) for r in rows] == [
        *(("eager", b) for b in "128"), ("compile", "1"), ("compile", "1024"),
        *(("ort-cpu", b) for b in ("1", "2", "8", "16")), ("ort-cuda", ""),
    ]  # fmt: skip
    assert float(rows[1]["p90_ms"]) == 21 and rows[2]["p90_ms"] == ""
    assert rows[-1]["status"] == "unavailable" and "no CUDA device" in rows[-1]["reason"]


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def test_page_is_whole_escaped_and_self_contained(tmp_path: Path) -> None:
    assert [path.name for path in write_reports(FULL, tmp_path)] == list(FILES)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)  # nothing temporary is left
    page = Page()
    page.feed((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.open == []
    names = [tag for tag, _ in page.tags]
    assert "script" not in names and "link" not in names  # the source's name holds a <script>
    assert "runs/<script>alert(1)</script>/task" in page.text
    links = [a.get("src") or a.get("srcset") for tag, a in page.tags if tag in ("img", "source")]
    pictures = []
    for link in links:
        kind, _, data = link.partition(";base64,")
        assert kind == "data:image/png"
        pictures.append(Image.open(io.BytesIO(base64.b64decode(data))))
    narrow, wide = pictures
    assert narrow.height > narrow.width and wide.width > wide.height
    assert names.count("table") == 3 and names.count("tr") == 3 + 3 + 2 + 4
    viewport = next(a for tag, a in page.tags if a.get("name") == "viewport")
    assert viewport["content"] == "width=device-width, initial-scale=1"
    for expected in (FULL.budget, "torch sees no CUDA device", "torch fp32 on the CPU", "vtk profile runs/pets/task"):
        assert expected in page.text


def test_plot_has_a_curve_for_each_backend() -> None:
    image = Image.open(io.BytesIO(latency_png(FULL)))
    colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)} <= colours


def test_plot_of_nothing_is_drawn_too() -> None:
    assert Image.open(io.BytesIO(latency_png(result(ABSENT, WRONG, budget_ms=5.0)))).width > 0


@pytest.mark.slow
def test_page_on_a_phone_as_a_picture(tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium here")
    write_reports(FULL, tmp_path)
    shot = tmp_path / "phone.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=390,2400"]
    url = (tmp_path / "report.html").as_uri()
    subprocess.run([browser, *options, f"--screenshot={shot}", url], check=True, capture_output=True, timeout=240)
    picture = Image.open(shot).convert("RGB")
    assert picture.width == 390
    colours = {colour: count for count, colour in picture.getcolors(1 << 24)}
    curve = colours[(0x00, 0x72, 0xB2)]  # the first back-end's, in the plot and as the border of the budget
    assert curve > 300
    # the plot made for narrow screens is as wide as the page: its white reaches both margins
    rows = [y for y in range(picture.height) if picture.getpixel((195, y)) == (255, 255, 255)]
    assert len(rows) > 600
    right = [picture.getpixel((x, y)) for x in (385, 389) for y in range(0, 1200, 7)]
    assert set(right) == {(255, 255, 255)}  # nothing of text or plot is cut off at the edge


def test_every_tick_of_a_short_axis_is_labelled() -> None:
    from vtk.profiling.figures import between

    assert [between((1.2, 2.8))(value, 0) for value in (1.4, 2.0, 2.6)] == ["1.4", "2", "2.6"]
    assert [between((0.5, 80.0))(value, 0) for value in (2.0, 3.0, 50.0)] == ["2", "", "50"]
