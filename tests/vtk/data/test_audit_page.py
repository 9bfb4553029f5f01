"""``vtk data audit``: what is odd, the page, and the command."""

import base64
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vtk.__main__ import main
from vtk.data import scan
from vtk.data.audit.page import page, thumbnail
from vtk.data.audit.unusual import SHOWN

RNG = np.random.default_rng(0)


def image(height: int, width: int, *channels: int) -> Image.Image:
    return Image.fromarray(RNG.integers(0, 256, (height, width, *channels), dtype=np.uint8))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "odd & <b>"
    for name in ("plain", "strange"):
        (root / name).mkdir(parents=True)
    for i in range(20):
        image(40, 50, 3).save(root / "plain" / f"{i}.png")
    strange = root / "strange"
    image(40, 40, 4).save(strange / "rgba.png")
    image(40, 40, 3).convert("P").save(strange / "palette.png", transparency=0)
    Image.fromarray(RNG.integers(0, 65536, (40, 40), dtype=np.uint16)).save(strange / "wide.png")
    image(40, 40, 3).convert("CMYK").save(strange / "ink.jpg")
    image(40, 40).save(strange / "grey.png")
    turned = Image.Exif()
    turned[0x0112] = 8
    image(40, 60, 3).save(strange / "turned.jpg", exif=turned)
    image(40, 160, 3).save(strange / "long.png")
    for i in range(SHOWN + 3):
        image(20 - i, 20, 3).save(strange / f"small{i}.png")
    (strange / "bad <i>.jpg").write_bytes(b"<script>alert(1)</script>")
    return root


def test_every_kind_is_found_with_its_examples(root: Path) -> None:
    odd = {kind.kind: kind for kind in scan(root, workers=0, show_progress=False).odd}
    names = {kind: {Path(e.name).stem for e in of.examples} for kind, of in odd.items()}
    small = {f"small{i}" for i in range(3, SHOWN + 3)}  # the smallest
    assert names == {
        "bad": {"bad <i>"}, "transparent": {"rgba", "palette"}, "wide": {"wide"}, "ink": {"ink"},
        "grey": {"grey", "wide"}, "turned": {"turned"}, "long": {"long", "small14"}, "small": small,
    }  # fmt: skip
    assert odd["small"].total == SHOWN + 3 and odd["small"].examples[0].text == "6×20"
    assert {e.text for e in odd["transparent"].examples} == {"RGBA", "P with transparency"}
    assert {e.of_class for of in odd.values() for e in of.examples} == {"strange"}


def test_a_grey_folder_is_not_odd(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(3):
            image(40, 40).save(tmp_path / name / f"{i}.png")
    audit = scan(tmp_path, workers=0, show_progress=False)
    assert audit.odd == () and "Nothing unusual" in page(audit)


class Reader(HTMLParser):
    """Collects tags, addresses and text; complains of tags that are not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for key, value in attrs if key in ("src", "href", "srcset")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_holds_everything_and_fetches_nothing(root: Path) -> None:
    audit = scan(root, workers=0, show_progress=False)
    text = page(audit)
    reader = Reader()
    reader.feed(text)
    assert reader.open == [] and not {"script", "link", "iframe"} & set(reader.tags)
    assert all(source.startswith("data:image/jpeg;base64,") for source in reader.sources)
    assert not re.search(r"https?://|@import|url\(", text)
    assert reader.tags.count("figure") == sum(len(kind.examples) for kind in audit.odd)
    assert reader.tags.count("img") + reader.tags.count("svg") == reader.tags.count("figure")
    assert reader.tags.count("svg") == 1  # the unreadable one
    for says in ("odd & <b>", "bad <i>.jpg", "not an image", "P with transparency", "small", "(15, 12 shown)"):
        assert says in reader.text


def test_thumbnails_show_what_training_sees(root: Path) -> None:
    def decoded(name: str) -> Image.Image:
        return Image.open(io.BytesIO(base64.b64decode(thumbnail(root / "strange" / name, 10**6))))

    assert decoded("turned.jpg").size == (96, 144)  # upright, at the longer side's 144 px
    assert decoded("long.png").size == (144, 36)
    assert decoded("small0.png").size == (80, 80)  # enlarged four times, no more
    assert thumbnail(root / "strange" / "bad <i>.jpg", 10**6) == "" == thumbnail(root / "plain" / "0.png", 1999)
    flat = Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    flat.save(root / "strange" / "clear.png")
    assert np.asarray(decoded("clear.png")).min() >= 250  # on white


def test_the_command(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "pages" / "a.html"
    argv = ["data", "audit", str(root), "--out", str(out), "--workers", "0"]
    assert main([*argv, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["classes"] == ["plain", "strange"] and told["page"] == str(out) and len(told["bad"]) == 1
    assert {each["kind"]: each["total"] for each in told["odd"]}["small"] == SHOWN + 3
    first = out.read_text("utf-8")
    assert main(argv) == 0 and "1 unreadable file skipped" in capsys.readouterr().out  # an audit is replaced
    assert out.read_text("utf-8") == first
    assert main([*argv, "--on-bad-image", "fail"]) == 3
    assert "cannot be read, and --on-bad-image is fail" in capsys.readouterr().err
    out.write_text("notes")
    assert main(argv) == 3 and "is not an audit page" in capsys.readouterr().err
    assert out.read_text() == "notes" and main([*argv, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        ([], 0, "audit"),
        (["scan"], 2, "unknown; choose one of: audit"),
        (["audit"], 2, "DATA"),
        (["audit", "/nowhere/at/all"], 3, "does not exist"),
        (["audit", ".", "--workers", "-1"], 2, "--workers"),
        (["audit", ".", "--in-chans", "0"], 2, "--in-chans"),
        (["audit", ".", "--out", "."], 3, "is a folder"),
    ],
)
def test_wrong_command_lines(
    argv: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["data", *argv]) == code
    told = capsys.readouterr()
    assert says in told.out + told.err


def test_names_that_cannot_be_written_are_escaped(root: Path) -> None:
    try:
        (root / "strange" / "grey.png").rename(root / "strange" / "x\udcff\n\u202e.png")
    except (OSError, UnicodeError):
        pytest.skip("this system has no such names")
    text = page(scan(root, workers=0, show_progress=False))
    assert "x\\udcff\\n\\u202e.png" in text
    text.encode("utf-8")


def test_the_command_does_not_import_torch(tree: Callable[..., Path]) -> None:
    root = tree({"a": 2, "b": 2})
    code = "import sys; from vtk.__main__ import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    argv = ["data", "audit", str(root), "--out", str(root.parent / "a.html"), "--workers", "0"]
    run = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    assert run.stdout.split()[-1] == "False"
