"""Training, evaluation and prediction see the same pixels, whatever the files are; judged by a loop of its own."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import adapt_input_conv

from vtk.__main__ import main
from vtk.data import scan
from vtk.errors import UsageError
from vtk.packs.cards import read_card
from vtk.packs.load import load_task
from vtk.training.finetune import finetune
from vtk.training.finetune_config import FinetuneConfig

SIDE = 16
TIMM = {"patch_size": 8, "depth": 1, "embed_dim": 32, "num_heads": 2}
RNG = np.random.default_rng(0)


def config(data: Path, out: Path, **changes: object) -> FinetuneConfig:
    """A run of a second from random weights, at a size that is not square."""
    kwargs = tuple(f"{key}={value}" for key, value in TIMM.items())
    values: dict[str, object] = {
        "data": data, "out": out, "model": "vit_tiny_patch16_224", "model_kwargs": kwargs, "pretrained": False,
        "img_size": (SIDE, 2 * SIDE), "epochs": 1, "batch_size": 8, "lr": 2e-3, "head_lr_mult": 1.0, "workers": 0,
        "device": "cpu", "memory": "plain",
    }  # fmt: skip
    return FinetuneConfig(**{**values, **changes})


def noise(shape: tuple[int, ...], label: int) -> np.ndarray:
    """Bytes that are darker or lighter by class."""
    return (RNG.integers(0, 128, shape) + 100 * label).astype(np.uint8)


def wild(folder: Path, label: int) -> None:
    """Write a file of every kind."""
    folder.mkdir(parents=True)
    rgb, grey = Image.fromarray(noise((20, 80, 3), label)), noise((30, 24), label)
    turned = Image.Exif()
    turned[0x0112] = 6
    rgb.save(folder / "wide object.png")
    rgb.resize((24, 31)).save(folder / "phone.jpg", exif=turned)
    Image.fromarray(noise((9, 17, 4), label), "RGBA").save(folder / "cutout.png")
    Image.fromarray(noise((9, 17, 2), label), "LA").save(folder / "la.png")
    Image.fromarray(grey).save(folder / "grey.jpg")
    Image.fromarray(grey > 150).save(folder / "bilevel.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(folder / "sixteen.png")
    Image.fromarray(grey / np.float32(255)).save(folder / "float.tif")
    rgb.convert("CMYK").save(folder / "print #1.jpg")
    rgb.convert("P").save(folder / "palette.gif", transparency=3)
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no more")


def judged(pack: Path, paths: list[Path]) -> np.ndarray:
    """Logits of a model that timm built, of files that were decoded one by one."""
    from vtk.data.decoding.decode import read_image
    from vtk.data.decoding.rules import Decoding
    from vtk.data.loading.eval_pipeline import eval_transform

    card, state = read_card(pack), load_task(pack).model.state_dict()
    chans, classes = card.input.in_chans, len(card.classes)
    model = timm.create_model(card.model.name, num_classes=classes, img_size=card.input.size, in_chans=chans, **TIMM)
    model.load_state_dict(state)
    transform = eval_transform(card.input)
    with torch.no_grad():
        decoding = Decoding.of(card.input)
        images = [transform(read_image(path, chans, card.data["max_pixels"], decoding)) for path in paths]
        return model.eval()(torch.stack(images)).numpy()


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wild") / "field photos #1"
    for part in ("train", "val"):
        for label, name in enumerate(("ämsel", "zaunkönig")):
            wild(root / part / name, label)
    (root / "train" / "no pictures").mkdir()
    Image.fromarray(noise((300, 300, 3), 0)).save(root / "val" / "ämsel" / "large.png")
    return root


@pytest.mark.parametrize("in_chans", [3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_every_kind_of_file(folder: Path, tmp_path: Path, in_chans: int, capsys: pytest.CaptureFixture[str]) -> None:
    result = finetune(config(folder, tmp_path / "run", in_chans=in_chans, max_pixels=80_000, mean=(0.4,)))
    card = read_card(result.task)
    assert card.input.in_chans == in_chans and card.input.mean == (0.4,) * in_chans
    assert [t.op for t in card.transforms] == ([] if in_chans == 3 else ["adapt_input"])

    told = run(["eval", str(result.task), str(folder), "--workers", "0"], capsys)
    assert told["top1"] == result.metrics.top1 and told["loss"] == result.metrics.loss
    skipped = {Path(each["path"]).name for each in told["skipped"]}
    assert skipped == {"broken.jpg", "large.png"}  # the limit of the training run holds here, too

    table = tmp_path / "p.csv"
    told = run(["predict", str(result.task), str(folder / "val"), "--top-k", "1", "--out", str(table)], capsys)
    assert {Path(each["path"]).name for each in told["skipped"]} == skipped
    held_out = scan(folder, classes=card.classes, in_chans=in_chans, max_pixels=80_000, show_progress=False).val
    logits = judged(result.task, [sample.path for sample in held_out])
    assert result.metrics.count == len(held_out) == 20
    assert result.metrics.top1 == np.mean(logits.argmax(1) == [sample.label for sample in held_out])
    labels = {each["path"]: each["labels"][0] for each in told["predictions"]}
    assert [labels[str(s.path)] for s in held_out] == [card.classes[i] for i in logits.argmax(1)]


def test_six_channels_of_pages(tmp_path: Path) -> None:
    for part, count in (("train", 4), ("val", 2)):
        for label, name in enumerate(("a", "b")):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                pages = [Image.fromarray(noise((20, 30), label)) for _ in range(6)]
                pages[0].save(tmp_path / part / name / f"{i}.tif", save_all=True, append_images=pages[1:])
    result = finetune(config(tmp_path, tmp_path / "run", in_chans=6, mean=tuple(i / 10 for i in range(1, 7)), epochs=2))
    task = load_task(result.task)
    stem = task.model.state_dict()["patch_embed.proj.weight"]
    assert stem.shape == (32, 6, 8, 8)
    assert "patch_embed.proj.weight" in task.card.pack["trained"]  # the pack carries the adapted stem
    paths = sorted((tmp_path / "val").rglob("*.tif"))
    hits = judged(result.task, paths).argmax(1) == [int(path.parent.name == "b") for path in paths]
    assert hits.mean() == result.metrics.top1


def test_the_adapted_stem_starts_as_timm_would_make_it(tmp_path: Path) -> None:
    from vtk.models.create import build_model

    options = {"num_classes": 2, "pretrained": False, "kwargs": TIMM, "img_size": (SIDE, SIDE)}
    colour = build_model("vit_tiny_patch16_224", **options)
    for in_chans in (1, 2, 4, 6):
        made = build_model("vit_tiny_patch16_224", in_chans=in_chans, **options)
        expected = adapt_input_conv(in_chans, colour.model.patch_embed.proj.weight.data)
        assert torch.equal(made.model.patch_embed.proj.weight.data, expected)
        assert made.base.ref.id == colour.base.ref.id and "patch_embed.proj.weight" in made.initial


def test_fail_stops_before_the_run_has_a_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["finetune", str(folder), "--on-bad-image", "fail", "--out", str(tmp_path / "run"), "--no-pretrained"]
    assert main([*argv, "--img-size", "224", "--device", "cpu"]) == 3
    assert "cannot be read, and --on-bad-image is fail" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_class_without_held_out_images_is_reported_with_none(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    for part, names in (("train", "abc"), ("val", "ac")):
        for label, name in enumerate(names):
            (root / part / name).mkdir(parents=True)
            for i in range(2):
                Image.fromarray(noise((16, 32, 3), label)).save(root / part / name / f"{i}.png")
    (root / "train" / "d").mkdir()
    result = finetune(config(root, tmp_path / "run", keep_empty_classes=True))
    rows = {row.name: row.count for row in result.metrics.per_class()}
    assert rows == {"a": 2, "b": 0, "c": 2, "d": 0}
    lines = (tmp_path / "run" / "per_class.csv").read_text().splitlines()
    assert lines[2] == "b,0,,," or lines[2].startswith("b,0,")
    assert read_card(result.task).classes == ("a", "b", "c", "d")
    assert len(load_task(result.task).model.state_dict()["head.bias"]) == 4


def test_options_that_cannot_be(folder: Path, tmp_path: Path) -> None:
    for options, says in (
        ({"in_chans": 0}, "--in-chans"), ({"max_pixels": 0}, "--max-pixels"),
        ({"on_bad_image": "ask"}, "--on-bad-image"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            config(folder, tmp_path / "run", **options)
    tasks = (f"a={folder}", f"b={folder}")
    with pytest.raises(UsageError, match="trains the stem, which the tasks of one run share"):
        dataclasses.replace(config(folder, tmp_path), data=None, tasks=tasks, in_chans=4)
    with pytest.raises(UsageError, match=r"`--mean` has 2 values; the input has 4 channels"):
        finetune(config(folder, tmp_path / "run", in_chans=4, mean=(0.1, 0.2)))
    with pytest.raises(UsageError, match="changes colours"):
        finetune(config(folder, tmp_path / "run", in_chans=4, color_jitter=0.3))
