"""Pages beside artefacts: the lines prepare images as evaluation does, bit for bit, and the class list is whole."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markdown_it import MarkdownIt
from PIL import Image, ImageCms

from vtk.card import Card, InputSpec, ModelSpec
from vtk.data.loading.eval_pipeline import eval_transform, read_input
from vtk.packs.prepare_code import prepare_code
from vtk.packs.readme import answer, card_sections, class_list, preprocessing

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SPECS = {
    "crop": InputSpec(32, 32, 3, MEAN, STD, crop_pct=0.875),
    "wide crop, bilinear": InputSpec(32, 48, 3, MEAN, STD, "bilinear", 0.9, decoding="srgb"),
    "pad": InputSpec(24, 40, 3, MEAN, STD, resize_mode="pad", decoding="srgb"),
    "squash, nearest": InputSpec(40, 24, 3, MEAN, STD, "nearest", resize_mode="squash"),
    "grey": InputSpec(32, 32, 1, (0.4,), (0.3,), crop_pct=0.95, decoding="srgb"),
    "grey pad": InputSpec(32, 40, 1, (0.4,), (0.3,), resize_mode="pad"),
    "opacity": InputSpec(32, 32, 4, (*MEAN, 0.5), (*STD, 0.5), crop_pct=0.9),
    "grey and opacity, pad": InputSpec(32, 24, 2, (0.4, 0.5), (0.3, 0.5), resize_mode="pad"),
    "16 bits": InputSpec(32, 32, 3, MEAN, STD, decoding="srgb", value_range=((100.0, 4095.0),), value_type="uint16"),
    "pages": InputSpec(
        32, 32, 5, (0.1, 0.2, 0.3, 0.4, 0.5), (0.5, 0.4, 0.3, 0.2, 0.1), decoding="srgb",
        value_range=tuple((float(i), 50_000.0 + i) for i in range(5)), value_type="uint16",
    ),
}  # fmt: skip


def noise(*shape: int, top: int = 255) -> np.ndarray:
    kind = np.uint8 if top == 255 else np.uint16
    return np.random.default_rng(sum(shape)).integers(0, top, shape, endpoint=True).astype(kind)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Images of every kind that Pillow reads whole."""
    folder = tmp_path_factory.mktemp("images")
    exif = Image.Exif()
    exif[0x0112] = 6
    colour = Image.fromarray(noise(45, 70, 3))
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    pages = [Image.fromarray(np.roll(noise(40, 52, top=60_000), i)) for i in range(5)]
    saved: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "turned.jpg": (colour, {"exif": exif}),
        "tall.png": (Image.fromarray(noise(90, 33, 3)), {}),
        "srgb.png": (colour, {"icc_profile": lab}),
        "grey.png": (Image.fromarray(noise(45, 70)), {}),
        "alpha.png": (Image.fromarray(noise(45, 70, 4)), {}),
        "grey-alpha.png": (Image.fromarray(noise(45, 70, 2), "LA"), {}),
        "palette.png": (colour.quantize(8), {"transparency": 0}),
        "cmyk.jpg": (colour.convert("CMYK"), {}),
        "deep.png": (Image.fromarray(noise(45, 70, top=5000)), {}),
        "tiny.png": (Image.fromarray(noise(1, 3, 3)), {}),
        "pages.tif": (pages[0], {"save_all": True, "append_images": pages[1:]}),
    }
    for name, (image, options) in saved.items():
        image.save(folder / name, **options)
    return {name: folder / name for name in saved}


@pytest.mark.parametrize("kind", SPECS)
def test_the_lines_of_a_page_prepare_files_bit_for_bit_as_evaluation_does(kind: str, files: dict[str, Path]) -> None:
    spec, space = SPECS[kind], {}
    exec(prepare_code(spec), space)
    transform = eval_transform(spec)
    mine = [name for name in files if (name == "pages.tif") == (spec.in_chans == 5)]
    for name in mine:
        if name == "deep.png" and spec.in_chans in (2, 4):
            continue  # 16 bits without a value range are for one or three channels
        have = space["prepare"](files[name])
        assert have.dtype == np.float32 and have.flags.c_contiguous
        np.testing.assert_array_equal(have, read_input(files[name], transform, 10**7).numpy()[None], name)


def test_a_wide_gamut_profile_becomes_srgb_in_the_lines_too(tmp_path: Path) -> None:
    spec: InputSpec = dataclasses.replace(SPECS["crop"], decoding="srgb")
    image = Image.fromarray(noise(45, 70, 3))
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    # red and green change places: lcms reads it, and every colour moves
    swapped = profile.replace(b"rXYZ", b"tmpX", 1).replace(b"gXYZ", b"rXYZ", 1).replace(b"tmpX", b"gXYZ", 1)
    image.save(tmp_path / "odd.png", icc_profile=swapped)
    space: dict[str, Any] = {}
    exec(prepare_code(spec), space)
    want = read_input(tmp_path / "odd.png", eval_transform(spec), 10**7).numpy()[None]
    plain = read_input(tmp_path / "odd.png", eval_transform(SPECS["crop"]), 10**7).numpy()[None]
    assert abs(want - plain).max() > 0.5
    np.testing.assert_array_equal(space["prepare"](tmp_path / "odd.png"), want)


def test_lines_for_a_graph_with_preprocessing_give_whole_images(files: dict[str, Path]) -> None:
    for kind, dtype, shape in (("crop", "uint8", (1, 45, 70, 3)), ("16 bits", "uint16", (1, 45, 70, 3))):
        space: dict[str, Any] = {}
        exec(prepare_code(SPECS[kind], raw=True), space)
        for name in ("deep.png", "alpha.png"):
            have = space["prepare"](files[name])
            assert (have.dtype, have.shape) == (np.dtype(dtype), shape)
    np.testing.assert_array_equal(
        space["prepare"](files["deep.png"])[0, ..., 0], np.asarray(Image.open(files["deep.png"]))
    )


def test_a_page_has_every_number_of_the_card() -> None:
    text = preprocessing(SPECS["wide crop, bilinear"])
    for said in ("32 × 48", "3 channels, RGB", "35 × 53", "bilinear", "crop_pct 0.9", str(list(MEAN)), str(list(STD)),
                 "ICC", "sRGB"):  # fmt: skip
        assert said in text, said
    assert "100 to 4095" in preprocessing(SPECS["16 bits"]) and "uint16" in preprocessing(SPECS["16 bits"])
    assert "ignored" in preprocessing(SPECS["crop"]) and "`squash`" in preprocessing(SPECS["squash, nearest"])
    assert "[124, 116, 104]" in preprocessing(SPECS["pad"])
    card = Card(ModelSpec("vit"), SPECS["crop"], ("a", "b"), multi_label=True)
    assert "sigmoid" in answer(card) and "0.5" in answer(card)
    assert "softmax" in answer(dataclasses.replace(card, multi_label=False))


@pytest.mark.parametrize("count", [2, 1000, 20_000])
def test_the_class_list_is_whole_and_reads_back(count: int) -> None:
    names = ("`` ` ```", "</details>", "\\[/b]", "a\nb", "\u202ecba", "Füße 猫", *(f"class {i}" for i in range(count)))
    page = card_sections(Card(ModelSpec("vit"), SPECS["crop"], names))
    tokens = MarkdownIt("commonmark").parse(page)
    html = [token.content for token in tokens if token.type == "html_block"]
    assert html == ([] if count < 100 else [f"<details><summary>Show all {len(names)}</summary>\n", "</details>\n"])
    table = next(token.content for token in tokens if token.type == "fence" and token.content.startswith("0 "))
    rows = [line.split(" ", 1) for line in table.splitlines()]
    assert [int(index) for index, _ in rows] == list(range(len(names)))
    assert tuple(json.loads(name) for _, name in rows) == names
    assert all(line.isprintable() for line in table.splitlines())
    assert re.search(rf"^## {len(names)} classes$", class_list(names), re.MULTILINE)
