"""Runs with another stem or FFN: from flags to packs, checkpoints, further runs, profiles and exports."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from vtk.__main__ import main
from vtk.card import Transform
from vtk.data.audit.folder_scan import scan
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.loading.loader import make_loader
from vtk.errors import DataError, UsageError
from vtk.packs.diff import diff_task
from vtk.packs.load import load_checkpoint, load_task
from vtk.training.finetune import finetune
from vtk.training.finetune_config import FinetuneConfig


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"stem": None}, ()),
        ({"stem": "1proj"}, (("replace_stem", {"stem": "1proj"}),)),
        ({"stem": "hmlp", "branches": 2},
         (("replace_stem", {"stem": "hmlp"}), ("parallelize", {"branches": 2}))),
        ({"stem": "3conv+3bn+3relu+1proj", "stem_act": "gelu", "stem_strides": (2, 2, 2, 2), "mlp": "bn"},
         (("replace_stem", {"stem": "conv", "act": "gelu", "strides": [2, 2, 2, 2]}),
          ("change_mlp", {"design": "bn"}))),
    ],
    ids=str,
)  # fmt: skip
def test_the_flags_are_transforms(flags: Any, expected: Any) -> None:
    assert FinetuneConfig(**flags).transforms() == tuple(Transform(op, args) for op, args in expected)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"stem_act": "gelu"}, "`--stem-act` needs another stem than the model's own; add --stem conv"),
        ({"stem": "1proj", "stem_strides": (16,)}, "`--stem-strides` needs another stem"),
        ({"stem": "conv", "stem_depth": 3}, "`--stem-depth` needs --stem local-transformer; --stem conv has fixed"),
        ({"stem": "levit", "stem_strides": (2, 2, 2, 2)}, "needs a conv stem; --stem levit has fixed strides"),
        ({"stem": "1proj+1relu", "stem_strides": (2, 2, 2, 2)}, "--stem 1proj.1relu has none, leave it out"),
        ({"stem": "3conv+1proj", "stem_act": "relu"}, "`--stem-act` relu: --stem 3conv.1proj has no activation"),
        ({"stem": "hmlp", "train": "lora"}, "`--stem`: timm cannot build it, so PEFT could not use the adapter"),
        ({"mlp": "relu", "train": "lora"}, "`--mlp`: timm cannot build it"),
        ({"stem": "hmlp", "tasks": ("a=x", "b=y"), "data": None}, "`--stem` changes what the tasks of one run share"),
    ],
)
def test_flags_that_contradict_are_refused(flags: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FinetuneConfig(**flags)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stem", "hmlp", "--model", "resnet18"], "ResNet has no `patch_embed`"),
        (["--stem", "levit", "--model", "vit_small_patch14_dinov2", "--img-size", "28"], "of 16 or 8 pixels"),
        (["--stem", "conv", "--stem-strides", "2,2,2,3"], "2 2 2 3 multiply to 24; this model's patch is 16"),
        (["--stem", "stone"], "stone"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_any_image_is_read(argv: Any, message: str, capsys: Any) -> None:
    assert main(["finetune", "nowhere", *argv]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def top1(model: nn.Module, card: Any, root: Path) -> float:
    audit = scan(root, classes=card.classes, show_progress=False)
    loader = make_loader(audit.val, eval_transform(card.input), batch_size=64, shuffle=False, seed=0, workers=0)
    with torch.no_grad():
        return float(torch.cat([(model(x).argmax(1) == y).double() for x, y in loader]).mean())


def test_a_stem_comes_back_from_its_pack_and_checkpoint(config: Any, photos: Path, tmp_path: Path, capsys: Any) -> None:
    result = finetune(config(stem="hmlp", train="head"))
    task = load_task(result.task)
    assert task.card.transforms == (Transform("replace_stem", {"stem": "hmlp"}),)
    packed = load_file(result.task / "task.safetensors")
    inside = {k for k in task.model.state_dict() if k.startswith("patch_embed.")}
    assert packed.keys() == inside | {"head.weight", "head.bias", "pos_embed"}
    assert all(torch.equal(task.model.state_dict()[k], v) for k, v in packed.items())
    assert float(packed["patch_embed.proj.1.running_mean"].abs().sum()) > 0
    assert top1(task.model, task.card, photos) == result.metrics.top1
    assert diff_task(result.task).shared_ffn == 8

    merged = tmp_path / "merged.safetensors"
    capsys.readouterr()
    assert main(["tasks", "merge", str(result.task), "--out", str(merged), "--json"]) == 0
    told, warned = capsys.readouterr()
    assert json.loads(told)["timm_code"] is None and "timm has no `replace_stem`" in " ".join(warned.split())
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(load_checkpoint(merged).model(images), task.model(images))

    # a further run takes the stem from the file and leaves it as it is; its pack finds this file as its base
    more = {"weights": merged, "pretrained": True, "epochs": 1, "train": "attn", "out": tmp_path / "more"}
    for other in ("conv", "1proj"):  # also the one that the model had before
        with pytest.raises(DataError, match=rf"was made with `replace_stem`.*, and .*'{other}'.* is requested"):
            finetune(config(**more, stem=other))
    again = load_task(finetune(config(**more)).task)
    assert again.card.transforms == task.card.transforms and again.base is not None
    assert not torch.equal(again.model.blocks[0].attn.qkv.weight, task.model.blocks[0].attn.qkv.weight)
    merged.unlink()  # and, when that is gone, the copy that was kept
    state = load_task(tmp_path / "more").model.state_dict()
    assert all(torch.equal(state[name], packed[name]) for name in inside)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_packs_of_other_dtypes_hold_a_stem(config: Any, photos: Path, dtype: str) -> None:
    result = finetune(config(stem="conv", stem_strides=(2, 2, 2, 2), mlp="bn", pack_dtype=dtype))
    task = load_task(result.task)
    assert top1(task.model, task.card, photos) == pytest.approx(result.metrics.top1, abs=0.15)
    with torch.no_grad():
        assert bool(task.model(torch.randn(2, 3, 32, 32)).isfinite().all())


@pytest.mark.slow
def test_two_epochs_and_one_more_are_three(config: Any, tmp_path: Path) -> None:
    whole = finetune(config(stem="conv", mlp="bn", epochs=3))
    parted = config(stem="conv", mlp="bn", epochs=3, out=tmp_path / "parted", stop_after=2)
    finetune(parted)
    rest = finetune(config(stem="conv", mlp="bn", epochs=3, out=tmp_path / "parted", resume=True))
    first, second = (load_file(r.task / "task.safetensors") for r in (whole, rest))
    assert first.keys() == second.keys() and all(torch.equal(v, second[k]) for k, v in first.items())


def vtk(capsys: Any, *argv: object) -> dict:
    capsys.readouterr()
    code = main([*map(str, argv), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


@pytest.mark.slow
def test_commands_need_no_flags_for_it(config: Any, photos: Path, tmp_path: Path, capsys: Any) -> None:
    packs = [finetune(config(stem="conv", out=tmp_path / name, seed=i)).task for i, name in enumerate("ab")]
    merged = tmp_path / "merged.safetensors"
    vtk(capsys, "tasks", "merge", packs[0], "--out", merged)
    for source in (packs[0], merged):
        assert "top1" in vtk(capsys, "eval", source, photos, "--device", "cpu")
        flags = ("--backends", "eager,fused,ort-cpu", "--batch-sizes", "1,2", "--duration", "0.05")
        assert len(vtk(capsys, "profile", source, *flags)["backends"]) == 3
        out = tmp_path / f"onnx-{source.name}"
        told = vtk(capsys, "export", "onnx", source, "--out", out)
        assert all(row["passed"] for row in told["verified"])
        kinds = [node.op_type for node in onnx.load(out / "model.onnx").graph.node]
        assert kinds.count("Conv") == 4 and "BatchNormalization" not in kinds
    bundle = tmp_path / "bundle"
    vtk(capsys, "tasks", "bundle", packs[0], "--out", bundle)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(load_task(bundle).model(images), load_task(packs[0]).model(images))


@pytest.mark.slow
def test_a_bank_serves_packs_of_one_stem(config: Any, tmp_path: Path) -> None:
    from vtk.bank import TaskBank

    first = finetune(config(stem="hmlp", out=tmp_path / "first", epochs=1))
    merged = tmp_path / "base.safetensors"
    assert main(["tasks", "merge", str(first.task), "--out", str(merged)]) == 0
    more = {"weights": merged, "pretrained": True}
    packs = {name: finetune(config(**more, out=tmp_path / name, seed=i)).task for i, name in enumerate("ab")}
    for options in ({}, {"fused": True}):
        bank = TaskBank(**options)
        for name, pack in packs.items():
            bank.add(name, pack)
        images = {name: torch.randn(2, 3, 32, 32) for name in packs}
        found = bank(images)
        for name, pack in packs.items():
            with torch.no_grad():
                torch.testing.assert_close(found[name], load_task(pack).model(images[name]), rtol=1e-4, atol=1e-5)
    own = finetune(config(weights=merged, pretrained=True, train="full", out=tmp_path / "own")).task
    with pytest.raises(UsageError, match=r"changed `.*`, which all tasks of a bank share"):
        bank.add("own", own)
