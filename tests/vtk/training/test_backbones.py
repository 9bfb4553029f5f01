"""DINOv3- and EVA-02-shaped models and RoPE-ViTs, trained end to end: what is trained, kept, resumed and written."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from vtk.__main__ import main
from vtk.packs.load import load_checkpoint, load_task
from vtk.training.finetune import finetune

SMALL = ("depth=2", "embed_dim=32", "num_heads=2")
EACH = range(2)
DINOV3 = {"model": "vit_small_plus_patch16_dinov3_qkvb", "model_kwargs": SMALL, "img_size": (32, 48)}
EVA02 = {"model": "eva02_base_patch14_224", "model_kwargs": SMALL, "img_size": (28, 42)}
MIXED = {"model": "vit_small_patch16_rope_mixed_ape_224", "model_kwargs": SMALL, "img_size": 32}
FUSED = ("qkv.weight", "q_bias", "v_bias", "proj.weight", "proj.bias")
SPLIT = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "v_proj.weight", "v_proj.bias", "proj.weight", "proj.bias")
WHOLE = ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias")
# EVA-02 of this size has no norm before its projection
TRAINED = {
    "DINOv3": (DINOV3, {f"blocks.{i}.attn.{leaf}" for i in EACH for leaf in FUSED}),
    "EVA-02": (EVA02, {f"blocks.{i}.attn.{leaf}" for i in EACH for leaf in SPLIT} | {"pos_embed"}),
    "RoPE-mixed": (MIXED, {f"blocks.{i}.attn.{leaf}" for i in EACH for leaf in WHOLE} | {"pos_embed", "rope.freqs"}),
}
RESUMED = {
    "averages": {"ema": 0.9},
    "int8": {"pack_dtype": "int8"},
    "bf16": {"precision": "bf16", "memory": "recompute"},
}


def pixels(size: tuple[int, int]) -> torch.Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["DINOv3", "EVA-02", pytest.param("RoPE-mixed", marks=pytest.mark.slow)])
def test_attention_alone_is_trained_and_its_pack_is_the_model(config, kind):
    options, names = TRAINED[kind]
    run = finetune(config(**options, epochs=1, lr=0.02, memory="plain"))
    stored = load_file(run.task / "task.safetensors")
    assert stored.keys() == names | {"head.weight", "head.bias"}
    task = load_task(run.task)
    state, base = task.model.state_dict(), task.base.tensors
    changed = {key for key, value in state.items() if key in base and not torch.equal(value, base[key])}
    assert changed - {"head.weight", "head.bias"} == names  # every one of them has moved, and nothing else
    assert all(torch.equal(state[key], value) for key, value in stored.items())


def test_mixed_frequencies_continue_at_another_size_and_from_a_checkpoint(config, tmp_path):
    weights, quick = tmp_path / "base.safetensors", {"epochs": 1, "memory": "plain", "pretrained": True}
    kwargs = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    torch.manual_seed(0)
    save_file(timm.create_model(MIXED["model"], num_classes=3, **kwargs).state_dict(), weights)
    run = finetune(config(**MIXED, **quick, lr=0.02, weights=weights))
    learned = load_file(run.task / "task.safetensors")["rope.freqs"]
    assert float((learned - load_file(weights)["rope.freqs"]).abs().max()) > 1e-4  # ten times what is allowed below
    # another grid: the frequencies are per channel, and the table of positions is resampled
    options = {**MIXED, **quick, "lr": 1e-8, "weights": weights}
    wide = finetune(config(**{**options, "img_size": (32, 64)}, init_from=(str(run.task),), out=tmp_path / "wide"))
    wider = load_task(wide.task).model
    assert torch.allclose(wider.rope.freqs, learned, atol=1e-5) and wider.pos_embed.shape == (1, 8, 32)
    assert wider.rope.get_embed().shape[-2] == 8
    merged = tmp_path / "merged.safetensors"
    assert main(["tasks", "merge", str(run.task), "--out", str(merged)]) == 0
    again = finetune(config(**{**options, "weights": merged}, out=tmp_path / "again"))
    assert torch.allclose(load_task(again.task).model.rope.freqs, learned, atol=1e-5)
    with torch.no_grad():
        found, wanted = (task.model(pixels((32, 32))) for task in (load_checkpoint(merged), load_task(run.task)))
    assert torch.equal(found, wanted)


def test_frequencies_do_not_decay_and_have_the_rate_of_the_first_layers(config):
    from vtk.models.create import build_model
    from vtk.training.engine.param_groups import parameter_groups
    from vtk.training.policies import policy

    model = build_model(MIXED["model"], num_classes=3, img_size=32, pretrained=False,
                        kwargs={"depth": 2, "embed_dim": 32, "num_heads": 2}).model  # fmt: skip
    policy.apply(model, policy.select(model, "attn"))
    groups = parameter_groups(model, config(**MIXED, weight_decay=0.1, layer_decay=0.5))
    (group,) = (g for g in groups if any(p is model.rope.freqs for p in g["params"]))
    assert group["weight_decay"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("changes", RESUMED)
def test_one_and_one_epoch_equal_two(config, tmp_path, kind, changes):
    options = {**TRAINED[kind][0], "memory": "plain", **RESUMED[changes], "epochs": 3}
    finetune(config(out=tmp_path / "whole", stop_after=2, **options))
    finetune(config(out=tmp_path / "parts", stop_after=1, **options))
    finetune(config(out=tmp_path / "parts", stop_after=1, resume=True, **options))
    states = [torch.load(tmp_path / run / "last" / "state.pt", weights_only=True) for run in ("whole", "parts")]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    for file in ("task/task.safetensors", "task-last/task.safetensors", "last/model.safetensors"):
        one, two = (load_file(tmp_path / run / file) for run in ("whole", "parts"))
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one), file


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINED)
def test_a_run_is_evaluated_merged_converted_exported_and_predicts(config, photos, tmp_path, capsys, kind):
    run = finetune(config(**TRAINED[kind][0], lr=0.01, memory="plain"))
    task = load_task(run.task)

    def command(*argv: object) -> dict:
        capsys.readouterr()
        assert main([*map(str, argv), "--json"]) == 0, argv
        return json.loads(capsys.readouterr().out)

    assert command("eval", run.task, photos)["top1"] == run.metrics.top1
    command("tasks", "merge", run.task, "--out", tmp_path / "merged.safetensors")
    state = load_checkpoint(tmp_path / "merged.safetensors").model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in task.model.state_dict().items())
    command("tasks", "to-peft", run.task, "--out", tmp_path / "peft")
    command("tasks", "from-peft", tmp_path / "peft", "--out", tmp_path / "back")
    back = load_task(tmp_path / "back").model.state_dict()
    assert all(torch.equal(value, back[key]) for key, value in task.model.state_dict().items())
    command("tasks", "bundle", run.task, "--out", tmp_path / "pack.vtkbundle")
    command("export", "onnx", run.task, "--out", tmp_path / "onnx")
    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])
    images = pixels(task.card.input.size)
    (found,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(found, task.model(images).numpy(), rtol=1e-4, atol=1e-5)
    picture = next(Path(photos).glob("val/red/*.png"))
    labels = [command("predict", source, picture)["predictions"][0]["labels"][0]
              for source in (run.task, tmp_path / "pack.vtkbundle", tmp_path / "onnx" / "model.onnx")]  # fmt: skip
    assert len(set(labels)) == 1
