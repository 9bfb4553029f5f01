"""Recipes of papers: every value is a field's, says something, and is what a run takes unless a flag says otherwise."""

import dataclasses
import re
from pathlib import Path

import pytest
import timm
import torch
import yaml

from vtk.__main__ import main
from vtk.card import InputSpec
from vtk.commands import _cli, train
from vtk.errors import UsageError
from vtk.models.meta_model import shapes_only
from vtk.training import recipes
from vtk.training.engine.param_groups import lr_factor
from vtk.training.engine.processes import Ranks
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.recipes import names, read_recipe
from vtk.training.runs.command_line import command_line, config_text
from vtk.training.step_rules.sharpness import make_step_rule
from vtk.training.train_config import TrainConfig, from_recipe

FOLDER = Path(recipes.__file__).parent
KINDS = {"train": TrainConfig, "finetune": FinetuneConfig, "pretrain": PretrainConfig}
EXPECTED = {
    "train": {
        "a2-bce", "alternet", "cifar", "conv-stem", "deit", "inception-mixer", "inception-mixer-adversarial",
        "inception-mixer-adversarial-sam", "inception-mixer-aug", "inception-mixer-aug-sam", "inception-mixer-sam",
        "inception-resnet", "inception-resnet-adversarial", "inception-resnet-adversarial-sam", "inception-resnet-sam",
        "inception-vit", "inception-vit-adversarial", "inception-vit-adversarial-sam", "inception-vit-aug",
        "inception-vit-aug-sam", "inception-vit-free", "inception-vit-sam",
    },
    "finetune": {"supcon-head", "transfer-cifar", "transfer-flowers", "transfer-pets"},
    "pretrain": {"dino", "supcon", "supcon-sam"},
}  # fmt: skip


def parse(*argv):
    return _cli.parse(TrainConfig, argv, prog="vtk train", description="", positional=("data",),
                      preset=("recipe", lambda name: read_recipe(name, TrainConfig)))  # fmt: skip


def test_the_papers_recipes_are_there():
    for command, expected in EXPECTED.items():
        assert set(names(command)) == expected == {path.stem for path in (FOLDER / command).glob("*.yaml")}


@pytest.mark.parametrize(("command", "name"), [(c, n) for c, expected in EXPECTED.items() for n in sorted(expected)])
def test_a_recipe_holds_only_differences_each_with_its_source(command, name):
    kind, path = KINDS[command], FOLDER / command / f"{name}.yaml"
    text = path.read_text("utf-8")
    values = yaml.safe_load(text)
    first, defaults = values.get("recipe"), {f.name: f.default for f in dataclasses.fields(kind)}
    before = {**defaults, **(read_recipe(first, kind) if first else {})}
    parsed = read_recipe(name, kind)
    for key in values.keys() - {"recipe"}:
        assert key in defaults and parsed[key] != before[key], key
    key = (FOLDER.parents[2] / "docs" / "concepts" / "papers-key.md").read_text("utf-8")
    papers = "|".join(map(re.escape, re.findall(r"^## (.+ \d{4})$", key, re.M)))
    assert re.match(rf"# (?:DeiT's recipe, as )?(?:{papers})\b", text)
    block = ""  # a comment may stand for the lines below it that have none
    for line in text.splitlines():
        key, _, comment = line.partition("#")
        if key.strip() and not key.startswith("recipe:"):
            block = comment.strip() or block
            assert re.search(r"the paper|sec\.|[Tt]able|app\.|code|config|ours|unpublished", block), line
    config = from_recipe(name, kind)
    assert all(getattr(config, key) == value for key, value in parsed.items()) and config.recipe == name


@pytest.mark.parametrize(
    ("recipe", "images", "steps", "rising"),
    [
        ("transfer-cifar", 50_000, 10_000, 500),
        ("transfer-flowers", 2_040, 500, 100),
        ("transfer-pets", 3_680, 500, 100),
    ],
)
def test_transfer_takes_the_steps_of_table_9(recipe, images, steps, rising):
    config = from_recipe(recipe, FinetuneConfig)
    planned = config.epochs * -(-images // config.batch_size)
    assert abs(planned - steps) <= -(-images // config.batch_size) / 2  # the nearest number of whole epochs
    assert config.warmup * planned == pytest.approx(rising, abs=1)
    assert (config.weight_decay, config.clip_grad, config.schedule, config.img_size) == (0, 1, "cosine", 224)


def test_sam_auto_of_a_recipe_is_table_11s_for_its_task():
    vit, mixer, resnet = "vit_base_patch16_224", "mixer_b16_224", "resnet152"
    wanted = {
        "inception-vit-sam": (vit, 0.2), "inception-vit-aug-sam": (vit, 0.05),
        "inception-vit-adversarial-sam": (vit, 0.1),
        "inception-mixer-aug-sam": (mixer, 0.2), "inception-mixer-adversarial-sam": (mixer, 0.25),
        "inception-resnet-adversarial-sam": (resnet, 0.05), "inception-resnet-sam": (resnet, 0.02),
    }  # fmt: skip
    with shapes_only():
        models = {name: timm.create_model(name) for name in (vit, mixer, resnet)}
    for name, (model, rho) in wanted.items():
        line = make_step_rule(from_recipe(name), models[model], [InputSpec(224, 224)], Ranks(torch.device("cpu")))[1]
        assert line.startswith(f"SAM, ρ {rho:g}") and ("2/255" in line) == ("adversarial" in name), (name, line)


def test_the_head_after_supcon_falls_as_the_authors_code_does():
    config = from_recipe("supcon-head", FinetuneConfig)
    steps = 90 * 626  # of 1,281,167 images in batches of 2,048
    rates = [lr_factor(step, steps, 0.0, config.min_lr, config.schedule) for step in range(0, steps, 313)]
    assert rates == pytest.approx([0.97**i for i in range(180)], rel=1e-4)  # × 0.97 every half epoch
    assert (config.lr, config.warmup * 90) == (pytest.approx(0.05 * 2048 / 256), pytest.approx(12, abs=1e-4))
    assert from_recipe("supcon", PretrainConfig).lr == pytest.approx(0.001 * 2048 / 256)


@pytest.mark.parametrize(
    ("command", "name"), [("finetune", "deit"), ("pretrain", "transfer-cifar"), ("train", "supcon")]
)
def test_a_recipe_of_another_command_is_one_line_that_names_it(command, name, capsys):
    assert main([command, "d", "--recipe", name]) != 0
    text = capsys.readouterr().err
    owner = next(c for c, expected in EXPECTED.items() if name in expected)
    assert f"`--recipe` {name} is of `vtk {owner}`" in text and names(command)[0] in text
    with pytest.raises(UsageError, match=f"is of `vtk {owner}`"):
        KINDS[command](recipe=name)


def test_a_recipe_of_fine_tuning_repeats_from_its_command_line():
    config = from_recipe("transfer-pets", FinetuneConfig, data=Path("d"), lr=0.03)
    words = command_line(config).split()
    assert words == ["vtk", "finetune", "d", "--recipe", "transfer-pets", "--lr", "0.03"]
    pre = from_recipe("supcon-sam", PretrainConfig, data=Path("d"))
    assert command_line(pre).split() == ["vtk", "pretrain", "d", "--recipe", "supcon-sam"]


def test_an_exponential_decay_needs_its_end():
    with pytest.raises(UsageError, match=r"--schedule exponential.* add --min-lr"):
        TrainConfig(schedule="exponential")


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
