"""The same image several times: within a class, under two labels, across the parts, by links; and near duplicates."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from vtk.__main__ import main
from vtk.card import Card, InputSpec, ModelSpec
from vtk.data import load_image, scan, write_digits
from vtk.data.audit.multilabel_scan import scan_multi
from vtk.data.audit.near_duplicates import _ORDER, NEAR, near_limit, near_pairs
from vtk.data.audit.page import page
from vtk.data.audit.split import split
from vtk.data.decoding.thin_images import NOMINAL
from vtk.data.probing.fingerprint import fingerprints, grid
from vtk.data.record import record_of
from vtk.errors import DataError, UsageError
from vtk.runtime.images import choose_images, find_images
from vtk.runtime.source import Source
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.pretrain.images import read_images

Tree = Callable[..., Path]


def quiet(root: Path, **options: object) -> object:
    return scan(root, show_progress=False, workers=0, **options)


def photograph(path: Path, seed: int, side: int = 96) -> Image.Image:
    """Write smooth shapes with edges, as photographs have; another seed is another picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (7, 7, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)
    image.save(path)
    return image


@pytest.fixture
def copied(tree: Tree) -> Path:
    root = tree({"train/a": 4, "train/b": 4, "val/a": 2, "val/b": 2})
    shutil.copy(root / "train/a/0.png", root / "val/a/leak.png")
    shutil.copy(root / "train/a/1.png", root / "train/b/other label.png")
    shutil.copy(root / "train/b/2.png", root / "train/b/again.png")
    return root


def test_copies_are_counted_and_named_by_kind(copied: Path) -> None:
    copies = quiet(copied).copies
    named = [sorted((p.name, p.of_class, p.part) for p in group) for group in copies.groups]
    assert named[0] == [("train/a/0.png", "a", "train"), ("val/a/leak.png", "a", "val")]  # a leak comes first
    assert sorted(named[1:]) == [
        [("train/a/1.png", "a", "train"), ("train/b/other label.png", "b", "train")],
        [("train/b/2.png", "b", "train"), ("train/b/again.png", "b", "train")],
    ]
    assert (copies.leaked, len(copies.conflicts), copies.repeated, copies.links) == (1, 1, 1, 0)


def test_each_kind_is_one_line_that_names_files(copied: Path) -> None:
    audit = quiet(copied)
    leak, conflict = audit.warnings
    assert leak.startswith("1 held-out image is byte-identical to training images, for example val/a/leak.png is ")
    assert (
        conflict.startswith("1 image has byte-identical copies under other labels")
        and "train/b/other label.png" in conflict
    )
    assert audit.notes == (
        "1 file is byte-identical to another one of the same class and part, and each counts as an image, for example "
        "train/b/again.png is train/b/2.png",
    )
    assert quiet(copied.parent / "data").to_dict()["copies"]["leaked"] == 1


def test_nothing_is_said_where_nothing_is_there_twice(tree: Tree) -> None:
    audit = quiet(tree({"train/a": 3, "train/b": 3, "val/a": 2, "val/b": 2}))
    assert audit.warnings == audit.notes == () and audit.copies.to_dict()["groups"] == []


@pytest.mark.parametrize("read", ["scan", "command", "finetune", "multi", "pretrain"])
def test_on_leak_fail_refuses_exact_leaks_everywhere(
    copied: Path, read: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says = r"1 held-out image is byte-identical to training images.* and --on-leak is fail"
    if read == "scan":
        with pytest.raises(DataError, match=says):
            quiet(copied, on_leak="fail")
        with pytest.raises(UsageError, match="warn or fail"):
            quiet(copied, on_leak="stop")
    elif read == "multi":
        with pytest.raises(DataError, match=says):
            scan_multi(copied, show_progress=False, workers=0, on_leak="fail")
    elif read == "pretrain":
        config = PretrainConfig(data=copied, on_leak="fail", out=tmp_path / "out")
        with pytest.raises(DataError, match=says):
            read_images(config, NOMINAL, labelled=False, show_progress=False)
    else:
        out = tmp_path / "out.html"
        argv = ["data", "audit", str(copied), "--out", str(out)] if read == "command" else [
            "finetune", str(copied), "--attn-only", "--no-pretrained", "--out", str(tmp_path / "run"),
        ]  # fmt: skip
        assert main([*argv, "--on-leak", "fail"]) == 3
        assert "val/a/leak.png is train/a/0.png" in capsys.readouterr().err
        if read == "command":
            assert "val/a/leak.png" in out.read_text()  # the page is written before
            assert main(argv) == 0


def test_links_count_by_their_place_and_are_named(tree: Tree) -> None:
    root = tree({"train/a": 3, "train/b": 3, "val/a": 1, "val/b": 1})
    os.symlink(root / "train/b", root / "train/a/more")
    os.link(root / "train/a/0.png", root / "train/a/hard.png")
    os.symlink(root / "train/a/1.png", root / "train/a/soft.png")
    audit = quiet(root)
    assert audit.counts("train") == [3 + 3 + 2, 3]
    assert audit.copies.links == 3 + 2 and len(audit.copies.conflicts) == 3 and audit.copies.repeated == 2
    assert any(
        w.startswith("train/a/more is a link to train/b, whose images are used a second time") for w in audit.warnings
    )
    assert any("5 of the identical files are hard or symbolic links" in note for note in audit.notes)


def test_a_class_or_part_that_is_a_link_to_another(tree: Tree) -> None:
    root = tree({"train/a": 2, "train/b": 2})
    os.symlink(root / "train/a", root / "train/c")
    os.symlink(root / "train", root / "val")
    audit = quiet(root)
    assert audit.copies.leaked == 6 and {"val": "train", "train/c": "train/a"}.items() <= audit.left.links.items()


# ---- the division keeps copies together


def sides(root: Path, **options: object) -> dict[str, str]:
    audit = quiet(root, **options)
    return {s.path.relative_to(root).as_posix(): part for part in ("train", "val") for s in getattr(audit, part)}


@pytest.mark.parametrize("seed", range(6))
def test_copies_come_to_one_side_of_a_flat_folder(tree: Tree, seed: int) -> None:
    root = tree({"a": 12, "b": 9})
    for i in range(6):
        shutil.copy(root / f"a/{i}.png", root / f"a/copy{i}.png")
        shutil.copy(root / f"a/{i}.png", root / f"b/copy{i}.png")  # a conflict is no leak, either
    side = sides(root, seed=seed)
    for i in range(6):
        assert len({side[f"a/{i}.png"], side[f"a/copy{i}.png"], side[f"b/copy{i}.png"]}) == 1
    audit = quiet(root, seed=seed)
    assert audit.copies.leaked == 0 and all(audit.counts("val")) and all(audit.counts("train"))
    assert abs(sum(audit.counts("val")) - 0.2 * 33) <= 3
    apart = [quiet(root, seed=s, together=False).copies.leaked for s in range(6)]
    assert max(apart) > 0  # as version 0.1 divided


@pytest.mark.parametrize("recorded", [False, True])
def test_runs_of_version_0_1_are_evaluated_on_their_own_division(tree: Tree, recorded: bool) -> None:
    root = tree({"a": 12, "b": 12})
    for i in range(6):
        shutil.copy(root / f"a/{i}.png", root / f"a/copy{i}.png")
    apart, together = quiet(root, together=False), quiet(root)
    assert set(apart.val) != set(together.val)
    data = {"layout": "flat", "val_split": 0.2, "seed": 0, "root": root.name}
    data |= {"images": record_of(together).to_dict()} if recorded else {}
    card = Card(ModelSpec("test_vit"), InputSpec(32, 32), ("a", "b"), data=data)
    _, part = find_images(Source("checkpoint", "m", None, card), root, "val")
    assert set(part.samples) == set((together if recorded else apart).val)
    assert set(choose_images(card, root, "val").paths) == {s.path for s in part.samples}


def test_a_set_without_copies_is_divided_as_ever(tree: Tree) -> None:
    root = tree({"a": 11, "b": 7})
    for seed in range(3):
        held = set()
        for name, count in (("a", 11), ("b", 7)):
            paths = [f"{name}/{i}.png" for i in range(count)]
            held.update(split(paths, paths, 0.2, seed)[1])
        side = sides(root, seed=seed)
        assert {name for name, part in side.items() if part == "val"} == held
        assert sides(root, seed=seed, together=False) == side


def test_a_class_of_one_image_many_times_is_not_divided(tree: Tree) -> None:
    root = tree({"a": 1, "b": 5})
    for i in range(4):
        shutil.copy(root / "a/0.png", root / f"a/{i}x.png")
    assert quiet(root).counts("val") == [0, 1]


def test_copies_of_several_labels_and_without_labels_come_to_one_side(tmp_path: Path, picture: Tree) -> None:
    lines = []
    for i in range(20):
        picture(tmp_path / f"{i}.png", seed=i)
        shutil.copy(tmp_path / f"{i}.png", tmp_path / f"{i}again.png")
        lines += [f"{i}.png,{'ab'[i % 2]};c\n", f"{i}again.png,c\n"]
    (tmp_path / "labels.csv").write_text("".join(lines))
    audit = scan_multi(tmp_path / "labels.csv", show_progress=False, workers=0)
    assert audit.val and audit.copies.leaked == 0 and len(audit.copies.conflicts) == 20
    found = read_images(PretrainConfig(data=tmp_path), NOMINAL, labelled=False, show_progress=False)
    assert found.val and found.copies.leaked == 0 and found.copies.repeated == 20


# ---- near duplicates


def bits(path: Path) -> int:
    image = load_image(path)
    return int(fingerprints([grid(image, image.size)])[0], 16)


def plain(image: Image.Image) -> str:
    cells = image.resize((9, 9), Image.Resampling.BOX).convert("L").load()
    value = 0
    for dx, dy in ((1, 0), (0, 1)):
        for y in range(8):
            for x in range(8):
                value = value << 1 | (cells[x + dx, y + dy] > cells[x, y])
    return f"{value:032x}"


def test_a_fingerprint_is_the_difference_hash(tmp_path: Path) -> None:
    for seed in range(5):
        image = photograph(tmp_path / "x.png", seed)
        assert fingerprints([grid(image, image.size)]) == [plain(image)]


def test_changed_copies_are_near_and_other_pictures_are_not(tmp_path: Path) -> None:
    root = tmp_path / "data"
    for i in range(30):
        photograph(root / f"train/{'ab'[i % 2]}/{i}.png", i)
    for i in range(6):
        photograph(root / f"val/{'ab'[i % 2]}/own{i}.png", 100 + i)
    first = Image.open(root / "train/a/0.png")
    first.save(root / "val/a/jpeg.jpg", quality=70)
    first.resize((60, 60), Image.Resampling.BICUBIC).save(root / "val/a/small.png")
    first.point(lambda v: min(255, int(v * 1.1))).save(root / "val/a/bright.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # stored on its side, shown upright
    first.transpose(Image.Transpose.ROTATE_90).save(root / "val/a/turned.jpg", exif=exif, quality=90)
    ImageOps.mirror(first).save(root / "val/a/mirrored.png")
    audit = quiet(root)
    near = {(a.name, b.name) for a, b in audit.copies.near}
    changed = ("jpeg.jpg", "small.png", "bright.png", "turned.jpg")
    assert {(a, b) for a, b in near if a.startswith("train")} == {("train/a/0.png", f"val/a/{n}") for n in changed}
    assert audit.copies.near_leaked == 4 and audit.copies.leaked == 0
    assert any(w.startswith("4 held-out images are near-duplicate to training images") for w in audit.warnings)
    assert quiet(root, on_leak="fail").val  # near ones only warn
    assert near == {(a.name, b.name) for a, b in quiet(root).copies.near}  # the same from the cache


def test_blank_and_tiny_images_are_never_near(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(12):
        for name, pixels in (
            ("white", np.full((64, 64, 3), 255 - i % 3)), ("noise", 250 + rng.integers(-2, 3, (64, 64, 3))),
            ("tiny", rng.integers(0, 256, (8, 8, 3))),
        ):  # fmt: skip
            spot = pixels.copy()
            if name == "white":
                spot[10 + i : 14 + i, 20:24] = 0  # something small, elsewhere in each
            folder = tmp_path / ("train" if i % 2 else "val") / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(spot.astype(np.uint8)).save(folder / f"{i}.png")
    copies = quiet(tmp_path).copies
    assert copies.near == () and copies.near_leaked == copies.near_within == 0


def test_the_demo_set_has_no_near_duplicates_and_at_most_a_line(tmp_path: Path) -> None:
    audit = quiet(write_digits(tmp_path / "digits"))
    assert len(audit.samples) == 1797 and audit.copies.near == () and len(audit.warnings) <= 1


def test_sets_whose_images_are_all_alike_are_not_judged(tmp_path: Path) -> None:
    write_digits(tmp_path / "digits", limit=30)
    for path in (tmp_path / "digits").glob("*/*/*.png"):  # enlarged, they are no longer too small
        Image.open(path).resize((64, 64), Image.Resampling.BICUBIC).save(path)
    audit = quiet(tmp_path / "digits")
    assert audit.copies.near_limit < 0 and audit.copies.near == () and audit.warnings == ()
    assert audit.notes == ("the images are too similar to each other (as digits or forms are) to find near duplicates",)


def test_the_limit_does_not_depend_on_the_copies(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    for count in (3, 10, 100, 1000):
        values = [int.from_bytes(rng.bytes(16)) for _ in range(count)]
        values += [value ^ 1 for value in values[: count // 3]]
        assert near_limit([f"{v:032x}" for v in values]) == NEAR, count


def test_near_pairs_are_those_of_comparing_each_with_each() -> None:
    rng = np.random.default_rng(1)
    values = [int.from_bytes(rng.bytes(16)) for _ in range(400)]
    for i in range(100):  # relatives at 1…20 bits
        value = values[i]
        for bit in rng.permutation(128)[: 1 + i // 5]:
            value ^= 1 << int(bit)
        values.append(value)
    every = {(i, j) for i in range(len(values)) for j in range(i) if (values[i] ^ values[j]).bit_count() <= NEAR}
    sure = {(i, j) for i, j in every if (values[i] ^ values[j]).bit_count() <= 7}
    found = [(j, i) for i, j in near_pairs([f"{v:032x}" for v in values])]
    assert len(set(found)) == len(found) and sure <= set(found) <= every and len(found) > 0.8 * len(every)
    apart = [(values[i] ^ values[j]).bit_count() for i, j in found]
    assert apart == sorted(apart)
    assert near_pairs([]) == near_pairs(["0" * 32]) == []


def test_twelve_bits_are_near_and_thirteen_are_not() -> None:
    value = int.from_bytes(np.random.default_rng(2).bytes(16))
    flipped = [sum(1 << (127 - int(bit)) for bit in _ORDER[:count]) for count in (12, 13)]  # six words stay as they are
    assert near_pairs([f"{v:032x}" for v in (value, value ^ flipped[0])]) == [(0, 1)]
    assert near_pairs([f"{v:032x}" for v in (value, value ^ flipped[1])]) == []


def test_the_search_is_bounded_where_all_images_are_alike() -> None:
    assert len(near_pairs(["0" * 32] * 3000, most=10_000)) <= 10_000


# ---- the page


def test_the_page_shows_leaks_beside_each_other(copied: Path) -> None:
    text = page(quiet(copied))
    leak = text.index("Held-out images in the training part")
    assert leak < text.index("Duplicates with different labels") < text.index("Duplicates <span")
    first = text[leak : text.index("Duplicates with different labels")]
    assert first.count("data:image/jpeg;base64,") == 2 and "train · a" in first and "held out · a" in first
    told = json.loads(json.dumps(quiet(copied).to_dict()))
    assert told["copies"]["groups"][0][1] == {"name": "val/a/leak.png", "of_class": "a", "part": "val"}
