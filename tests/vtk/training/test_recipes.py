"""Recipes of papers: every value is a field's, says something, and is what a run takes unless a flag says otherwise."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from vtk.commands import _cli, train
from vtk.errors import UsageError
from vtk.training import recipes
from vtk.training.recipes import names, read_recipe
from vtk.training.runs.command_line import command_line, config_text
from vtk.training.train_config import TrainConfig, from_recipe

FOLDER = Path(recipes.__file__).parent
DEFAULTS = {f.name: f.default for f in dataclasses.fields(TrainConfig)}
EXPECTED = {
    "a2-bce", "alternet", "cifar", "conv-stem", "deit", "inception-mixer", "inception-mixer-sam", "inception-resnet",
    "inception-resnet-sam", "inception-vit", "inception-vit-sam",
}  # fmt: skip


def own(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text("utf-8"))


def parse(*argv):
    return _cli.parse(TrainConfig, argv, prog="vtk train", description="", positional=("data",),
                      preset=("recipe", lambda name: read_recipe(name, TrainConfig)))  # fmt: skip


def test_the_papers_recipes_are_there():
    assert set(names()) == EXPECTED == {path.stem for path in FOLDER.glob("*.yaml")}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_recipe_holds_only_differences_each_with_its_source(name):
    values, first = own(name), own(name).get("recipe")
    before = {**DEFAULTS, **(read_recipe(first, TrainConfig) if first else {})}
    parsed = read_recipe(name, TrainConfig)
    for key in values.keys() - {"recipe"}:
        assert key in DEFAULTS and parsed[key] != before[key], key
    text = (FOLDER / f"{name}.yaml").read_text("utf-8")
    key = (FOLDER.parents[2] / "docs" / "concepts" / "papers-key.md").read_text("utf-8")
    papers = "|".join(map(re.escape, re.findall(r"^## (.+ \d{4})$", key, re.M)))
    assert re.match(rf"# (?:DeiT's recipe, as )?(?:{papers})\b", text)
    block = ""  # a comment may stand for the lines below it that have none
    for line in text.splitlines():
        key, _, comment = line.partition("#")
        if key.strip() and not key.startswith("recipe:"):
            block = comment.strip() or block
            assert re.search(r"the paper|sec\.|[Tt]able|app\.|code|config|ours|unpublished", block), line
    config = from_recipe(name)
    assert all(getattr(config, key) == value for key, value in parsed.items()) and config.recipe == name


def test_shares_of_the_warm_up_are_those_of_the_papers():
    def share(name):
        return from_recipe(name).warmup

    for name, wanted in (("deit", 5 / 300), ("a2-bce", 5 / 300), ("cifar", 5 / 305), ("alternet", 5 / 305)):
        assert share(name) == pytest.approx(wanted, abs=1e-6)
    images = 1_281_167
    assert share("inception-vit") == pytest.approx(10_000 / (300 * images / 4096), abs=1e-5)
    assert share("inception-resnet") == pytest.approx(5_000 / (90 * images / 4096), abs=1e-5)
    assert share("conv-stem") == share("deit")


@pytest.mark.parametrize(
    ("name", "batch", "rate"),
    [("deit", 1024, 1e-3), ("deit", 256, 2.5e-4), ("conv-stem", 1024, 2e-3), ("a2-bce", 2048, 4e-3),
     ("inception-vit", 4096, 3e-3), ("inception-resnet", 4096, 1.6), ("cifar", 96, 1.25e-4), ("cifar", 32, 1.25e-4)],
)  # fmt: skip
def test_the_rate_is_the_papers_for_its_batch_and_scales_where_it_does(name, batch, rate):
    assert from_recipe(name, batch_size=batch).scaled().lr == pytest.approx(rate)


def test_flags_win_over_the_config_file_and_that_over_the_recipe(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("mixup: 0.5\ncutmix: 0.25\n")
    config = parse("d", "--cutmix", "0", "--config", str(file), "--recipe", "deit")
    assert (config.mixup, config.cutmix, config.reprob, config.val_split) == (0.5, 0.0, 0.25, 0.2)
    file.write_text("recipe: deit\nepochs: 7\n")
    config = parse("d", f"--config={file}")
    assert (config.recipe, config.epochs, config.mixup) == ("deit", 7, 0.8)
    config = parse("d", f"--config={file}", "--recipe=cifar")
    assert (config.recipe, config.epochs, config.mixup) == ("cifar", 7, 1.0)


def test_a_saved_config_and_a_cards_command_give_the_run_again(tmp_path):
    config = from_recipe("deit", data=Path("d"), mixup=0.0, batch_size=32, hflip=0.25)
    words = command_line(config).split()
    assert words[:5] == ["vtk", "train", "d", "--recipe", "deit"]
    assert {"--mixup", "--batch-size", "--hflip"} == {w for w in words[5:] if w.startswith("--")}
    assert parse(*words[2:]) == config
    file = tmp_path / "config.yaml"
    file.write_text(config_text(config))
    assert parse("d", "--config", str(file)) == config


def test_a_file_is_a_recipe_too_and_begins_with_another(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: deit\nepochs: 20\nlr: 1e-4\n")
    config = from_recipe(str(file), epochs=3)
    assert (config.epochs, config.lr, config.cutmix, config.recipe) == (3, 1e-4, 1.0, str(file))
    saved = tmp_path / "config.yaml"
    saved.write_text(config_text(config))
    file.unlink()
    assert parse("--config", str(saved)) == dataclasses.replace(config, recipe=None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epocs: 3\n", "unknown key `epocs`"),
        ("train: full\n", "unknown key `train`"),  # fixed, so no field
        ("epochs: many\n", "`--epochs` is many"),
        ("- epochs\n", "must hold `key: value` lines"),
        ("data: here\n", "`data` is of one run"),
        ("recipe: {file}\n", "begins with it"),
        ("recipe: nobody\n", "`--recipe` nobody is not one of a2-bce"),
        ("mixup: -1\n", "--mixup` is -1"),
    ],
)
def test_a_wrong_recipe_is_one_line(tmp_path, text, message):
    file = tmp_path / "mine.yaml"
    file.write_text(text.replace("{file}", str(file)))
    with pytest.raises(UsageError, match=re.escape(message)) as info:
        from_recipe(str(file))
    assert "\n" not in str(info.value)


def test_an_absent_recipe_is_one_line():
    with pytest.raises(UsageError, match=r"is not one of a2-bce, .*, nor a \.yaml file"):
        read_recipe("deti", TrainConfig)
    with pytest.raises(UsageError, match=r"none\.yaml: No such file"):
        read_recipe("none.yaml", TrainConfig)


def test_help_names_the_recipes_and_shows_their_values(capsys):
    with pytest.raises(SystemExit):
        train.main(["--recipe", "deit", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "inception-vit-sam" in text and "default: 0.8" in text
