"""Images, folders and tables of any bytes and names: read or refused, the same by the scan and by training."""

import io
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from vtk.data import load_image, scan
from vtk.data.audit.multilabel_scan import scan_multi
from vtk.data.probing.probe import probe_all
from vtk.data.sources.layout import class_name
from vtk.errors import DataError

FEW = settings(
    max_examples=40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
PIXELS = (np.random.default_rng(0).random((24, 32, 3)) * 255).astype(np.uint8)


def encoded(kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    Image.fromarray(PIXELS).save(out, kind, **options)
    return out.getvalue()


FILES = {
    "jpeg": encoded("JPEG"), "progressive": encoded("JPEG", progressive=True), "png": encoded("PNG"),
    "gif": encoded("GIF"), "tiff": encoded("TIFF", compression="tiff_lzw"), "webp": encoded("WEBP"),
    "bmp": encoded("BMP"),
}  # fmt: skip


@FEW
@pytest.mark.parametrize("kind", FILES)
@given(data=st.data())
def test_changed_bytes_are_an_image_or_a_bad_file_for_scan_and_training_alike(
    kind: str, data: st.DataObject, tmp_path: Path
) -> None:
    raw = bytearray(FILES[kind])
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, min(len(raw) - 1, 400)))] = data.draw(st.integers(0, 255))
    del raw[data.draw(st.integers(1, len(raw)) | st.just(len(raw))) :]
    path = tmp_path / "x.jpg"
    path.write_bytes(raw)
    (found,) = probe_all([str(path)], max_pixels=10**6)
    if found.bad:
        assert "\n" not in found.bad
        with pytest.raises(DataError):
            load_image(path, max_pixels=10**6)
    else:
        image = load_image(path, max_pixels=10**6)
        assert image.mode == "RGB" and image.size == (found.width, found.height)


NAME = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..") and len(name.encode()) < 200
)
PART = st.sampled_from(["train", "val", "test", "Train", "a", "b", ".git", "__MACOSX", "e\u0301", "é", "x y", "#1"])


@FEW
@given(paths=st.lists(st.lists(PART | NAME, min_size=1, max_size=3), max_size=8))
def test_any_folder_is_read_by_its_names_or_refused_in_a_line(paths: list[list[str]]) -> None:
    root = Path(tempfile.mkdtemp())
    try:
        for i, parts in enumerate(paths):
            for j in range(2):
                file = root.joinpath(*parts) / f"{i}{j}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(FILES["png"])
        try:
            audit = scan(root, workers=0, cache=False, show_progress=False)
        except DataError as error:
            assert "\n" not in str(error)
            return
        names = {name.lower() for name in audit.classes}
        assert not names & {".git", "__macosx"} and not (names & {"train", "val", "test"} == names)
        for sample in audit.samples:
            inner = [class_name(part) for part in sample.path.relative_to(root).parts[:2]]
            assert audit.classes[sample.label] in inner
    finally:
        shutil.rmtree(root)


LINE = st.lists(st.sampled_from(["0.png", "1.png", "./0.png", "a;b", "", "train", "val", '"', "é", "..", "x" * 300]))


@FEW
@given(lines=st.lists(LINE, max_size=6), junk=st.binary(max_size=8))
def test_any_table_is_read_or_refused_in_a_line(lines: list[list[str]], junk: bytes, tmp_path: Path) -> None:
    for i in range(2):
        (tmp_path / f"{i}.png").write_bytes(FILES["png"])
    table = tmp_path / "labels.csv"
    table.write_bytes("\n".join(map(",".join, lines)).encode() + junk)
    try:
        audit = scan_multi(table, workers=0, cache=False, show_progress=False)
    except DataError as error:
        assert "\n" not in str(error)
    else:
        assert audit.train and all(set(np.unique(sample.label)) <= {0.0, 1.0} for sample in audit.samples)
        assert len({s.path for s in audit.samples}) == len(audit.samples) <= 2
