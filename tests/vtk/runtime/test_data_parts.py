"""Which images judge a model: those that its run held out, by content, whatever became of the folder."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vtk.analysis.sources import Images
from vtk.card import Card, InputSpec, ModelSpec
from vtk.data.audit.folder_scan import scan
from vtk.data.record import Record, read_record, record_of
from vtk.errors import DataError
from vtk.runtime.images import choose_images, find_images
from vtk.runtime.source import Source

CLASSES = ("blue", "green")


def draw(path: Path, number: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(number).integers(0, 255, (20, 20, 3), dtype=np.uint8)).save(path)
    return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """Two class folders of ten images, without parts."""
    for label, name in enumerate(CLASSES):
        for i in range(10):
            draw(tmp_path / "data" / name / f"{i}.png", 100 * label + i)
    return tmp_path / "data"


def trained_on(folder: Path, **options: Any) -> Source:
    """What a run on the folder leaves behind, as far as its images go."""
    audit = scan(folder, **options)
    data = {
        "layout": audit.layout, "val_split": audit.val_split, "seed": audit.seed, "root": folder.name,
        "images": record_of(audit).to_dict(),
    }  # fmt: skip
    card = Card(ModelSpec("test_vit"), InputSpec(32, 32), CLASSES, metrics={"count": len(audit.val)}, data=data)
    return Source("checkpoint", "m", None, card)


def contents(paths: Any) -> set[str]:
    return {digest(path) for path in paths}


def parts(folder: Path) -> tuple[set[str], set[str]]:
    audit = scan(folder)
    return contents(s.path for s in audit.train), contents(s.path for s in audit.val)


def judged(source: Source, data: Path, split: Any = "val") -> tuple[set[str], Any]:
    _, part = find_images(source, data, split)
    return contents(sample.path for sample in part.samples), part


def test_a_folder_that_grew_gives_the_same_held_out_images(flat: Path, capsys: Any) -> None:
    source, (trained, held) = trained_on(flat), parts(flat)
    # of names that the division puts last, so that it holds out more of the others
    names = [
        n for n in (f"green/new{i}.png" for i in range(200)) if hashlib.sha256(f"0:{n}".encode()).digest()[0] > 230
    ]
    new = len([draw(flat / name, 1000 + i) for i, name in enumerate(names)])
    assert parts(flat)[1] & trained  # divided anew, images that were trained on would judge
    found, part = judged(source, flat)
    assert found == held and part.same and part.left_out == {"trained on": 16, "unknown to it": new}
    assert (
        f"left out: 16 that it trained on, {new} unknown to it (--split all takes every image)"
        in capsys.readouterr().out
    )
    assert judged(source, flat, "train")[0] == trained
    assert len(judged(source, flat, "all")[0]) == 20 + new


def test_images_that_moved_or_were_renamed_are_known_by_content(flat: Path) -> None:
    source, (trained, held) = trained_on(flat), parts(flat)
    for path in sorted(flat.rglob("*.png")):
        path.rename(path.with_name(f"{digest(path)[:8]}.png"))
    found, part = judged(source, flat)
    assert found == held and not part.same  # the same images at other places: no claim of equality
    other = flat.parent / "other" / "deep"
    shutil.copytree(flat, other)
    assert judged(source, other)[0] == held and judged(source, other, "train")[0] == trained


def test_a_division_into_other_parts_does_not_judge_on_trained_images(flat: Path, capsys: Any) -> None:
    source, (trained, _) = trained_on(flat), parts(flat)
    split = flat.parent / "split"
    for i, path in enumerate(sorted(flat.rglob("*.png"))):
        target = split / ("train" if i % 3 else "val") / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    own = contents((split / "val").rglob("*.png"))
    assert own & trained
    found, part = judged(source, split)
    assert found == own - trained and part.left_out["trained on"] == len(own & trained) and not part.same
    assert "that it trained on" in capsys.readouterr().out


def test_a_folder_without_an_image_of_the_run_is_taken_whole(flat: Path, tmp_path: Path, capsys: Any) -> None:
    source = trained_on(flat)
    for label, name in enumerate(CLASSES):
        for i in range(3):
            draw(tmp_path / "fresh" / name / f"{i}.png", 5000 + 100 * label + i)  # the run's names, other images
    found, part = judged(source, tmp_path / "fresh")
    assert len(found) == 6 and not part.same and not part.left_out
    said = capsys.readouterr()
    assert (
        "no image of" in said.out
        and "6 images of" in said.err
        and "have the paths of the training run's, with other content" in said.err
    )
    # one image that was trained on does not make the others' names those of the run
    leak = next(sample.path for sample in scan(flat).train)
    shutil.copy(leak, tmp_path / "fresh" / CLASSES[0] / "leak.png")
    found, part = judged(source, tmp_path / "fresh")
    assert digest(leak) not in found and part.left_out["trained on"] == 1


def test_only_trained_images_are_refused_and_missing_and_changed_ones_are_said(flat: Path, capsys: Any) -> None:
    source, (trained, _) = trained_on(flat), parts(flat)
    held = [sample.path for sample in scan(flat).val]
    draw(held[0], 9000)
    held[1].unlink()
    found, part = judged(source, flat)
    assert found == contents([held[0], *held[2:]]) and not part.same
    said = capsys.readouterr().err
    assert "1 of the 4 images that the training run held out are not in" in said
    assert "1 of the images that the training run held out have changed since" in said
    for path in held[2:] + held[:1]:
        path.unlink()
    assert contents(flat.rglob("*.png")) == trained
    with pytest.raises(DataError, match=r"no image that the training run held out.*all 16 of its images.*--split all"):
        find_images(source, flat, "val")


def test_cards_without_a_list_are_divided_and_warned_of_where_the_number_differs(flat: Path, capsys: Any) -> None:
    source = trained_on(flat)
    del source.card.data["images"]
    assert judged(source, flat)[1].same
    assert "training run held out" not in capsys.readouterr().err
    for i in range(10):
        draw(flat / "blue" / f"new{i}.png", 1000 + i)
    assert not judged(source, flat)[1].same
    assert "the training run held out 4 images, this part of" in capsys.readouterr().err


def test_a_damaged_list_is_refused_in_one_line(flat: Path) -> None:
    source = trained_on(flat)
    for told in ({"train": "AAA", "val": None}, {"train": 5, "val": ""}, [], {"train": "AAAA", "val": "AAAA"}):
        source.card.data["images"] = told
        with pytest.raises(DataError, match="list of the run's images is damaged") as error:
            find_images(source, flat, "val")
        assert "\n" not in str(error.value)


def test_a_record_is_read_as_it_was_written(flat: Path) -> None:
    record = record_of(scan(flat))
    assert read_record({"images": record.to_dict()}) == record and len(record.val or ()) == 4
    assert read_record({}) is None and read_record({"images": {"train": None, "val": None}}) == Record(None, None)


def test_exports_take_the_same_images_without_decoding_them(flat: Path, monkeypatch: Any, capsys: Any) -> None:
    source, (trained, held) = trained_on(flat), parts(flat)
    monkeypatch.setattr("vtk.data.probing.probe_files.probe_many", lambda *a, **k: pytest.fail("images were decoded"))
    for i in range(5):
        draw(flat / "blue" / f"new{i}.png", 1000 + i)
    for split, wanted in (("val", held), ("train", trained)):
        chosen = choose_images(source.card, flat, split)
        assert contents(chosen.paths) == wanted
        assert chosen.labels == tuple(CLASSES.index(path.parent.name) for path in chosen.paths)
    # loose photographs, a copy of a trained one among them
    loose = flat.parent / "loose"
    for i in range(4):
        draw(loose / f"{i}.png", 7000 + i)
    shutil.copy(scan(flat, look="read").train[0].path, loose / "copy.png")
    chosen = choose_images(source.card, loose, "train")
    assert [path.name for path in chosen.paths] == ["copy.png"] and chosen.labels is None
    (loose / "copy.png").unlink()
    assert len(choose_images(source.card, loose, "val").paths) == 4
    assert "no image of" in capsys.readouterr().out
    one = choose_images(source.card, loose / "0.png", "val")
    assert one.paths == (loose / "0.png",) and one.labels is None


def test_what_version_0_1_divided_is_divided_alike_in_exports_and_evaluations(flat: Path) -> None:
    source = trained_on(flat)
    del source.card.data["images"]
    for path in scan(flat).val:
        path.path.write_bytes(b"no image any more")
    held, judged_by_exports = judged(source, flat)[0], choose_images(source.card, flat, "val").paths
    assert held and contents(judged_by_exports) == held


def test_a_part_too_large_to_be_listed_is_said(flat: Path, tmp_path: Path, capsys: Any) -> None:
    source = trained_on(flat)
    source.card.data["images"]["train"] = None
    shutil.copytree(flat / CLASSES[0], tmp_path / "own" / CLASSES[0])
    for path in scan(flat).val:
        (tmp_path / "own" / path.path.parent.name / path.path.name).unlink(missing_ok=True)
    judged(source, tmp_path / "own")  # only images that it was trained on
    assert "the card does not list what the training run trained on" in capsys.readouterr().err
    assert judged(source, flat, "train")[0] == parts(flat)[0]


def test_a_leak_judges_only_under_the_path_where_it_was_held_out(flat: Path, tmp_path: Path) -> None:
    split = tmp_path / "split"
    for i, path in enumerate(sorted(flat.rglob("*.png"))):
        target = split / ("train" if i % 2 else "val") / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    leak = split / "train" / CLASSES[0] / "1.png"
    shutil.copy(leak, split / "val" / CLASSES[0] / "leak.png")
    source = trained_on(split)
    assert digest(leak) in judged(source, split)[0]  # as the run measured it
    assert digest(leak) not in judged(source, split / "val")[0]
    with pytest.raises(DataError, match="no image that the training run held out"):
        judged(source, split / "train")


def test_an_analysis_knows_its_images_by_content(flat: Path) -> None:
    for path in list(flat.rglob("*.png")):
        Image.open(path).save(path.with_suffix(".bmp"))
        path.unlink()

    def told() -> str:
        audit = scan(flat)
        return Images(audit.val, None, audit).digest()

    before, path = told(), scan(flat).val[0].path
    size = path.stat().st_size
    assert draw(path, 9000).stat().st_size == size and told() != before
