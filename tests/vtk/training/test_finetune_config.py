"""Values that a fine-tuning config refuses."""

import dataclasses
import subprocess
import sys

import pytest

from vtk.errors import UsageError
from vtk.options import option_of
from vtk.training.finetune_config import FinetuneConfig


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"attn_only": True, "train": "full"}, "--attn-only.*--train is full"),
        ({"precision": "int4"}, "--precision` is int4; allowed is auto, fp32, bf16 or fp16"),
        ({"resume": True, "overwrite": True}, "--resume.*--overwrite"),
        ({"weights": "x", "pretrained": False}, "--weights.*--no-pretrained"),
        ({"epochs": 0}, "--epochs` is 0; allowed is at least 1"),
        ({"batch_size": 0}, "--batch-size"),
        ({"lr": 0.0}, "--lr` is 0.0; allowed is above 0"),
        ({"weight_decay": -1.0}, "--weight-decay"),
        ({"smoothing": 1.0}, "--smoothing"),
        ({"warmup": 1.5}, "--warmup"),
        ({"hflip": 2.0}, "--hflip"),
        ({"val_split": 0.0}, "--val-split"),
        ({"crop_pct": 1.5}, "--crop-pct"),
        ({"crop_scale": (0.9, 0.3)}, "--crop-scale"),
        ({"crop_scale": (0.9,)}, "--crop-scale"),
        ({"workers": -1}, "--workers"),
        ({"workers": 100_000}, "--workers` is 100000; allowed is from 0 to 1024"),
        ({"lr": 1e300}, "--lr` is 1e\\+300; allowed is above 0, at most 1e6"),
        ({"weight_decay": 1e300}, "--weight-decay"),
        ({"multi_label": True, "keep_empty_classes": True}, "--keep-empty-classes"),
        ({"stop_after": 0}, "--stop-after"),
        *(
            ({name: value}, f"--{name.replace('_', '-')}")
            for name in ("lr", "head_lr_mult", "weight_decay", "clip_grad", "mixup", "cutmix", "color_jitter")
            for value in (float("inf"), float("nan"))
        ),
        ({"seed": -1}, "--seed` is -1; allowed is from 0 to 4294967295"),
        ({"seed": 1 << 70}, "--seed"),
        ({"color_jitter": 99.0}, "--color-jitter"),
        ({"crop_pct": 1e-9}, "--crop-pct"),
    ],
)
def test_bad_values_are_refused(values, text):
    with pytest.raises(UsageError, match=text) as info:
        FinetuneConfig(**values)
    assert "\n" not in str(info.value)


def test_every_option_has_help():
    assert all(option_of(FinetuneConfig, f.name).help for f in dataclasses.fields(FinetuneConfig))


def test_attn_is_the_default_and_attn_only_says_the_same():
    assert FinetuneConfig().train == "attn" == FinetuneConfig(attn_only=True).train


def test_neither_config_nor_command_imports_torch():
    code = "import sys, vtk.commands.finetune, vtk.training; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
