"""Runs with another architecture than the weights': Context Broadcasting, parallel branches, and both."""

import dataclasses
import json
from pathlib import Path

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
from vtk.models.transforms.context_broadcast import ContextBroadcast
from vtk.packs.diff import diff_task
from vtk.packs.load import load_checkpoint, load_task
from vtk.training.finetune import finetune
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.policies import policy
from vtk.training.policies.census import take_census


def scales(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v for k, v in model.state_dict().items() if k.endswith(".scale")}


def top1(model: nn.Module, card, root: Path) -> float:
    """Accuracy on the held-out images by a loop of its own."""
    audit = scan(root, classes=card.classes, show_progress=False)
    loader = make_loader(audit.val, eval_transform(card.input), batch_size=64, shuffle=False, seed=0, workers=0)
    with torch.no_grad():
        right = [(model(x).argmax(1) == y).double() for x, y in loader]
    return float(torch.cat(right).mean())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ()),
        ({"cb": True},
         (("add_context_broadcast", {"scale": False, "placement": "end", "on": "mlp", "layers": "upper"}),)),
        (
            {"cb_scale": True, "cb_layers": ("0", "3"), "cb_on": "both", "cb_placement": "front", "branches": 3},
            (("parallelize", {"branches": 3}),
             ("add_context_broadcast", {"scale": True, "placement": "front", "on": "both", "layers": [0, 3]})),
        ),
        ({"cb": True, "cb_scale": True, "cb_layers": ("all",)},
         (("add_context_broadcast", {"scale": True, "placement": "end", "on": "mlp", "layers": "all"}),)),
    ],
)  # fmt: skip
def test_the_flags_are_transforms_of_plain_json(flags: dict, expected: tuple) -> None:
    found = FinetuneConfig(**flags).transforms()
    assert found == tuple(Transform(op, args) for op, args in expected)
    assert json.loads(json.dumps([dataclasses.asdict(t) for t in found])) == [dataclasses.asdict(t) for t in found]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"cb_layers": ("all",)}, "need --cb or --cb-scale; add one of them"),
        ({"cb_on": "msa"}, "need --cb or --cb-scale; add one of them"),
        ({"cb": True, "cb_layers": ("lower",)}, "`--cb-layers` lower: give upper, all, or block numbers"),
        ({"cb": True, "cb_layers": ("all", "3")}, "`--cb-layers` all 3"),
        ({"cb": True, "cb_layers": ()}, "`--cb-layers` is empty"),
        ({"cb": True, "cb_layers": ("-1",)}, "`--cb-layers` -1"),
        ({"branches": 0}, "`--branches` is 0; allowed is at least 1"),
    ],
)
def test_wrong_flags_are_refused(flags: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FinetuneConfig(**flags)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--cb", "--model", "resnet18"], "ResNet cannot have Context Broadcasting"),
        (["--cb", "--cb-layers", "0,12"], "`layers` has 12; the model's blocks are 0 to 11"),
        (["--cb", "--cb-on", "msa", "--cb-placement", "mid"], "mid needs timm's Mlp"),
        (["--branches", "5"], "a depth of 12 can be divided by 2, 3, 4, 6, 12"),
        (["--branches", "2", "--model", "vit_tiny_patch16_1x2_224"], "is already parallel"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_image_is_read(argv, message, capsys, tmp_path) -> None:
    assert main(["finetune", str(tmp_path / "nowhere"), *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["attn", "attn+norm", "ffn", "head", "full"])
def test_every_policy_trains_the_factors_and_counts_them_apart(tiny, parallel, name) -> None:
    from vtk.models.transforms.context_layers import add_context_broadcast

    for model, count in ((tiny(), 4), (parallel, 4)):
        add_context_broadcast(model, scale=True, on="both")
        assert set(scales(model)) <= policy.select(model, name)
        rows = {r.group: r for r in take_census(model, policy.select(model, name), name).rows}
        assert (rows["context"].trained, rows["context"].frozen) == (count * 32, 0)
        groups = policy.group_names(model)
        assert {g for n, g in groups.items() if n.endswith((".fc1.weight", ".fc2.bias"))} == {"ffn"}
        assert {g for n, g in groups.items() if n.endswith((".qkv.weight", ".proj.bias")) and "attn" in n} == {
            "attention"
        }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_with_factors_comes_back_from_its_pack(config, photos, precision) -> None:
    result = finetune(config(cb_scale=True, cb_layers=("all",), precision=precision, train="head"))
    task = load_task(result.task)
    arguments = {"scale": True, "placement": "end", "on": "mlp", "layers": "all"}
    assert task.card.transforms == (Transform("add_context_broadcast", arguments),)
    packed = load_file(result.task / "task.safetensors")
    names = {f"blocks.{i}.mlp.cb.scale" for i in range(2)}
    assert names == set(scales(task.model)) and names <= packed.keys()
    assert all(float(packed[n].abs().sum()) > 0 and torch.equal(task.model.state_dict()[n], packed[n]) for n in names)
    assert packed.keys() == names | {"head.weight", "head.bias", "pos_embed"}
    assert sum(isinstance(m, ContextBroadcast) for m in task.model.modules()) == 2
    if precision == "fp32":
        assert top1(task.model, task.card, photos) == result.metrics.top1
    diff = diff_task(result.task)
    assert (diff.shared_ffn, diff.total_ffn) == (8, 8)  # the factors are no FFN tensors that a task changed


def test_a_pack_with_broadcasting_is_merged_and_trained_further(config, photos, tmp_path, capsys) -> None:
    result = finetune(config(cb_scale=True, cb_layers=("1",)))
    merged = tmp_path / "merged.safetensors"
    capsys.readouterr()
    assert main(["tasks", "merge", str(result.task), "--out", str(merged), "--json"]) == 0
    told, warned = capsys.readouterr()
    assert json.loads(told)["timm_code"] is None
    assert "warning: plain timm cannot load it: timm has no `add_context_broadcast`" in " ".join(warned.split())
    whole, pack = load_checkpoint(merged), load_task(result.task)
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(whole.model(images), pack.model(images))

    more = {"weights": merged, "pretrained": True, "epochs": 1, "lr": 1e-8, "out": tmp_path / "more"}
    with pytest.raises(DataError, match=r"merged.safetensors was made with `add_context_broadcast`.* is requested"):
        finetune(config(**more, cb=True))
    again = load_task(finetune(config(**more)).task)
    assert again.card.transforms == pack.card.transforms
    for name, scale in scales(pack.model).items():
        torch.testing.assert_close(scales(again.model)[name], scale, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("fuse", ["--no-fuse", "--fuse"])
def test_a_pack_with_broadcasting_passes_the_export_gate(config, tmp_path, capsys, fuse) -> None:
    pack = finetune(config(cb_scale=True, cb_layers=("1",), cb_on="both")).task
    capsys.readouterr()
    assert main(["export", "onnx", str(pack), "--out", str(tmp_path / "onnx"), fuse, "--json"]) == 0
    assert all(row["passed"] for row in json.loads(capsys.readouterr().out)["verified"])


def test_branches_join_a_sequential_base_and_share_it(config, photos, tmp_path) -> None:
    flags = {"model_kwargs": ("depth=4", "embed_dim=32", "num_heads=2"), "epochs": 1}
    result = finetune(config(**flags, branches=2, cb=True))
    task = load_task(result.task)
    assert [t.op for t in task.card.transforms] == ["parallelize", "add_context_broadcast"]
    assert len(task.model.blocks) == 2 and task.model.blocks[0].num_parallel == 2
    assert [block for block, b in enumerate(task.model.blocks) if getattr(b, "cb", None) is not None] == [1]
    assert top1(task.model, task.card, photos) == result.metrics.top1
    sequential = load_task(finetune(config(**flags, out=tmp_path / "sequential")).task)
    assert task.base.ref == sequential.base.ref  # one base, two architectures
    ffn = "blocks.1.ffns.0.mlp.fc1.weight"
    assert torch.equal(task.model.state_dict()[ffn], sequential.model.state_dict()["blocks.2.mlp.fc1.weight"])


def test_a_config_file_repeats_a_run_with_broadcasting(config, tmp_path) -> None:
    first = finetune(config(cb_scale=True, cb_layers=("0", "1"), epochs=1))
    assert "--cb-scale --cb-layers 0 1" in load_task(first.task).card.command
    argv = ["finetune", str(config().data), "--config", str(first.out / "config.yaml"), "--out", str(tmp_path / "b")]
    assert main([*argv, "--workers", "0"]) == 0
    again = load_task(tmp_path / "b" / "task").model.state_dict()
    assert all(torch.equal(v, again[k]) for k, v in load_task(first.task).model.state_dict().items())
