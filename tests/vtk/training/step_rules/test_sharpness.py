"""Step rules from options: Chen et al. 2022's table of radii, what is refused, and runs from end to end."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from timm.models.mlp_mixer import MlpMixer
from torch import nn

from tests.vtk.training.test_resume import same_runs
from vtk.card import InputSpec
from vtk.data.audit.result import DataAudit
from vtk.errors import UsageError
from vtk.models.inputs import blank_model
from vtk.training.engine.processes import Ranks
from vtk.training.finetune import finetune, finetune_tasks, memory_report
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.runs.identity import check_identity, run_identity
from vtk.training.step_rules.radii import find_radius
from vtk.training.step_rules.sharpness import make_step_rule

CPU = torch.device("cpu")

# Chen et al. 2022, table 11; models that timm has no name for are made from their arguments
TABLE = [
    ("resnet50", {}, "supervised", 0.02),
    ("resnet101", {}, "supervised", 0.05),
    ("resnetv2_152", {}, "supervised", 0.02),
    ("resnetv2_50", {"width_factor": 2}, "supervised", 0.05),
    ("resnetv2_101", {"width_factor": 2}, "supervised", 0.05),
    ("resnetv2_152", {"width_factor": 2}, "supervised", 0.05),
    ("resnetv2_50", {}, "adversarial", 0.05),
    ("resnet101", {}, "adversarial", 0.05),
    ("resnet152", {}, "adversarial", 0.05),
    ("vit_small_patch32_224", {}, "supervised", 0.05),
    ("vit_small_patch16_224", {}, "supervised", 0.1),
    ("vit_small_patch14_dinov2", {}, "supervised", 0.1),
    ("vit_small_patch8_224", {}, "supervised", 0.15),
    ("vit_base_patch32_224", {}, "supervised", 0.15),
    ("vit_base_patch16_224", {}, "supervised", 0.2),
    ("vit_base_patch16_224", {}, "augmented", 0.05),
    ("vit_small_patch16_224", {}, "adversarial", 0.1),
    ("vit_base_patch32_224", {}, "adversarial", 0.1),
    ("vit_base_patch16_224", {}, "adversarial", 0.1),
    ("vit_small_patch16_224", {}, "contrastive", 0.02),
    ("vit_base_patch16_224", {}, "contrastive", 0.02),
    ("mixer_s32_224", {}, "supervised", 0.1),
    ("mixer_s16_224", {}, "supervised", 0.15),
    ("mixer_s8", {}, "supervised", 0.2),
    ("mixer_b32_224", {}, "supervised", 0.35),
    ("mixer_b16_224", {}, "supervised", 0.6),
    ("mixer_b8", {}, "supervised", 0.6),
    ("mixer_b16_224", {}, "augmented", 0.2),
    ("mixer_s16_224", {}, "adversarial", 0.05),
    ("mixer_b32_224", {}, "adversarial", 0.25),
    ("mixer_b16_224", {}, "adversarial", 0.25),
    # not in the table: the nearest
    ("vit_tiny_patch16_224", {}, "supervised", 0.1),
    ("vit_large_patch16_224", {}, "supervised", 0.2),
    ("vit_base_patch8_224", {}, "supervised", 0.2),
    ("deit3_small_patch16_224", {}, "supervised", 0.1),
    ("deit_base_distilled_patch16_224", {}, "augmented", 0.05),
    ("vit_small_patch16_224", {"patch_size": 4, "img_size": 32}, "supervised", 0.15),
    ("resnet18", {}, "supervised", 0.02),
]


SHAPES = {"mixer_s8": (8, 512), "mixer_b8": (8, 768)}


def model_of(name, kwargs):
    if name not in SHAPES:
        return blank_model(name, kwargs)
    patch, width = SHAPES[name]
    with torch.device("meta"):
        return MlpMixer(num_classes=2, patch_size=patch, embed_dim=width, num_blocks=1)


@pytest.mark.parametrize("rows", [TABLE[10:12], pytest.param(TABLE, marks=pytest.mark.slow)], ids=["some", "all"])
def test_the_table_of_radii(rows):
    for name, kwargs, kind, wanted in rows:
        found, entry = find_radius(model_of(name, kwargs), kind)
        assert found == wanted and kind in entry, (name, kwargs, entry)


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("levit_128s", "supervised", "LevitDistilled"),
        ("resmlp_12_224", "supervised", "MlpMixer of ResBlock"),
        ("resnet18", "contrastive", "contrastive training of a ResNet"),
    ],
)
def test_architectures_out_of_the_table_are_refused(name, kind, text):
    with pytest.raises(UsageError, match=rf"`--sam` auto: .*{text}.*; give a number") as told:
        find_radius(blank_model(name), kind)
    assert "\n" not in str(told.value)


def rule_of(world=1, model=None, **changes):
    config = FinetuneConfig(batch_size=32, **changes)
    return make_step_rule(
        config, model or blank_model("vit_small_patch16_224"), [InputSpec(4, 4)], Ranks(CPU, 0, world)
    )


@pytest.mark.parametrize(
    ("flags", "rho", "text"),
    [
        ({"sam": 0.3}, 0.3, "SAM, ρ 0.3:"),
        ({"sam": 1}, 1.0, "SAM, ρ 1:"),
        ({"sam": "auto"}, 0.1, "SAM, ρ 0.1 (ViT-S/16, supervised in Chen et al. 2022):"),
        ({"sam": "auto", "sam_adaptive": True}, 1.0, "adaptive SAM, ρ 1 (10 times the 0.1 of ViT-S/16"),
        ({"sam": "auto", "mixup": 0.5, "auto_augment": "rand-m9"}, 0.05, "ViT-B/16, augmented"),
        ({"sam": "auto", "mixup": 0.5}, 0.1, "ViT-S/16, supervised"),
        ({"sam": "auto", "adversarial": 2, "mixup": 0.5}, 0.1, "adversarial in Chen et al. 2022); images"),
        ({"adversarial": 0.5}, None, "images against the model, by up to 0.5/255: every step runs its images twice"),
    ],
)  # fmt: skip
def test_flags_make_a_rule_that_says_what_it_does(flags, rho, text):
    rule, line = rule_of(**flags)
    assert rule.rho == rho and rule.adaptive == flags.get("sam_adaptive", False)
    assert text in line and (rule.adversary is not None) == ("adversarial" in flags)


def test_without_flags_there_is_no_rule():
    assert rule_of() == (None, "")


@pytest.mark.parametrize(
    ("world", "accumulate", "images", "wanted"),
    [
        (1, 1, None, (None, False)), (1, 1, 8, (8, False)), (1, 1, 32, (None, False)), (1, 2, 33, (33, False)),
        (1, 2, 64, (None, False)), (4, 2, None, (None, False)), (4, 2, 16, (16, False)), (4, 2, 64, (None, True)),
        (1, 1, 33, "allowed is 1 to 32, the images of a step"), (1, 2, 65, "allowed is 1 to 64, the images of a step"),
        (4, 2, 17, r"allowed is 1 to 16 \(a process's images of a step\), or 64 \(all of the step's\)"),
    ],
)  # fmt: skip
def test_groups_of_images(world, accumulate, images, wanted):
    flags = {"sam": 0.1, "sam_m": images, "accumulate": accumulate}
    if isinstance(wanted, str):
        with pytest.raises(UsageError, match=wanted):
            rule_of(world, **flags)
    else:
        rule, _ = rule_of(world, **flags)
        assert (rule.most, rule.together) == wanted


def test_one_image_has_no_statistics():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(UsageError, match=r"--sam-m` is 1.*BatchNorm; give 2 or more"):
        rule_of(model=model, sam=0.1, sam_m=1)
    model[1].requires_grad_(False)
    assert rule_of(model=model, sam=0.1, sam_m=1)[0].most == 1


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"sam": 0.0}, "`--sam` is 0.0; allowed is a radius above 0, or auto"),
        ({"sam": -1}, "`--sam` is -1"), ({"sam": "automatic"}, "`--sam` is automatic"),
        ({"sam": float("nan")}, "--sam"),
        ({"sam": True}, "`--sam` is True"), ({"sam": 0.1, "sam_m": 0}, "`--sam-m` is 0; allowed is at least 1"),
        ({"sam_adaptive": True}, "`--sam-adaptive` needs --sam; add"),
        ({"sam_m": 4}, "`--sam-m` needs --sam; add"), ({"adversarial": 0.0}, "`--adversarial` is 0.0"),
        ({"adversarial": 256}, "`--adversarial` is 256; allowed is above 0 to 255"),
    ],
)  # fmt: skip
def test_bad_values_are_refused(values, text):
    with pytest.raises(UsageError, match=text) as told:
        FinetuneConfig(**values)
    assert "\n" not in str(told.value)


def test_runs_of_older_versions_go_on_and_others_not():
    now = run_identity(
        FinetuneConfig(), base_id="b", audit=DataAudit(Path("x"), "flat", (), (), ()), precision="fp32", world=1
    )
    flags = [f.name for f in dataclasses.fields(FinetuneConfig) if f.name.startswith(("sam", "adversarial"))]
    old = {**now, "flags": {k: v for k, v in now["flags"].items() if k not in flags or k == "sampler"}}
    check_identity(old, now, FinetuneConfig)
    changed = {**now, "flags": {**now["flags"], "sam": 0.1}}
    with pytest.raises(UsageError, match=r"--sam 0.1 \(was None\)"):
        check_identity(old, changed, FinetuneConfig)


BOTH = {"sam": "auto", "adversarial": 2.0}


def test_a_run_says_logs_and_goes_on_bit_for_bit(config, tmp_path, capsys):
    changes = {"drop_path": 0.2, "mixup": 0.4, "accumulate": 2, "ema": 0.9, **BOTH}
    whole = finetune(config(out=tmp_path / "whole", **changes))
    said = " ".join("".join(capsys.readouterr()).split())
    assert "SAM, ρ 0.1 (ViT-S/16, adversarial in Chen et al. 2022); images against the model, by up to 2/255" in said
    for i in range(2):
        finetune(config(out=tmp_path / "parts", stop_after=1, resume=i > 0, **changes))
    same_runs(tmp_path / "whole", tmp_path / "parts")
    rows = [json.loads(line) for line in (whole.out / "metrics.jsonl").read_text().splitlines()]
    assert all(row["perturbed_loss"] > row["loss"] for row in rows)
    with pytest.raises(UsageError, match=r"these differ: .*--sam None \(was auto\)"):
        finetune(config(out=tmp_path / "parts", resume=True, **{**changes, "sam": None}))


def test_what_is_refused_leaves_an_earlier_run_alone(config):
    result = finetune(config(epochs=1))
    before = (result.out / "metrics.csv").read_bytes()
    for flags in (
        {"sam": 0.1, "sam_m": 999},
        {"sam": "auto", "model": "test_efficientnet", "model_kwargs": (), "train": "full"},
    ):
        with pytest.raises(UsageError, match="--sam"):
            finetune(config(overwrite=True, **flags))
        assert (result.out / "metrics.csv").read_bytes() == before


@pytest.mark.parametrize("adaptive", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_task_climbs_in_a_joint_run_as_in_a_run_of_its_own(config, photos, tmp_path, adaptive):
    """By its own gradient and norm: the packs are those of runs of one task, up to the rounding of shared products."""
    flags = {"sam": 0.5 if adaptive else 0.05, "sam_adaptive": adaptive, "epochs": 1, "drop_path": 0.0}
    names = ("a", "b")
    joint = finetune_tasks(config(data=None, out=tmp_path / "joint", tasks=[f"{n}={photos}" for n in names], **flags))
    alone = finetune(config(out=tmp_path / "alone", **flags))
    mine = load_file(alone.out / "task-last" / "task.safetensors")
    for name in names:
        theirs = load_file(joint.tasks[name].task_last / "task.safetensors")
        assert all(torch.allclose(theirs[n], mine[n], atol=1e-4) for n in mine)
        assert joint.tasks[name].rows[0]["perturbed_loss"] == pytest.approx(alone.rows[0]["perturbed_loss"], rel=1e-3)


def test_the_estimate_counts_the_copy_and_the_gradient_of_the_images(config):
    def of(**flags):
        return {f.mode: f for f in memory_report(config(dry_run=True, **flags)).counted}["plain"]

    plain, sam, groups = (of(**flags) for flags in ({}, {"sam": 0.1}, {"sam": 0.1, "sam_m": 4}))
    assert sam.gradients == sam.optimizer - plain.optimizer == groups.optimizer - sam.optimizer
    assert sam.image == plain.image
    head, against = of(train="head"), of(train="head", adversarial=2.0)
    assert against.image > 2 * head.image  # nothing in the blocks is trained, and yet they are run back through
