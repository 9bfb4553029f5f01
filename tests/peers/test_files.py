"""What vtk writes, opened by others' tools in an environment without vtk."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vtk.__main__ import main
from vtk.packs import load_task

pytestmark = pytest.mark.peers

MODEL = """
import timm, torch
from safetensors.torch import load_file
model = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, depth=2, embed_dim=48, num_heads=2)
"""


def logits(pack: Path, images: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return load_task(pack).model.eval()(torch.from_numpy(images)).numpy()


def off(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(abs(found - wanted).max() / abs(wanted).max())


def command(*argv: object) -> None:
    assert main(list(map(str, argv))) == 0


def test_plain_timm_loads_what_tasks_merge_writes(foreign, record, pack, images, tmp_path):
    command("tasks", "merge", pack, "--out", tmp_path / "merged.safetensors")
    found = foreign(f"""{MODEL}
model.load_state_dict(load_file("merged.safetensors"), strict=True)
with torch.no_grad():
    logits = model.eval()(torch.from_numpy(images)).numpy()
""")
    np.testing.assert_allclose(found, logits(pack, images), atol=1e-5)
    record(
        "timm", "checkpoint of `tasks merge`, with the call in its README", difference=off(found, logits(pack, images))
    )


def test_stock_peft_loads_what_to_peft_writes(foreign, record, pack, images, tmp_path):
    command("tasks", "to-peft", pack, "--out", tmp_path / "adapter")
    found = foreign(f"""{MODEL}
from peft import PeftModel
model.load_state_dict(load_file("adapter/base.safetensors"), strict=True)
with torch.no_grad():
    alone = model.eval()(torch.from_numpy(images))
    model = PeftModel.from_pretrained(model, "adapter").eval()
    logits = model(torch.from_numpy(images)).numpy()
    assert abs(alone.numpy() - logits).max() > 1e-2, "the adapter does nothing"
    merged = model.merge_and_unload()
    np.testing.assert_allclose(merged(torch.from_numpy(images)).numpy(), logits, atol=1e-5)
""")
    np.testing.assert_allclose(found, logits(pack, images), atol=1e-5)
    record("PEFT", "adapter of `tasks to-peft`", difference=off(found, logits(pack, images)))


def test_stock_peft_loads_the_adapter_of_a_lora_run_as_its_page_says(foreign, images, weights, tmp_path):
    rng = np.random.default_rng(0)
    for part, count in (("train", 4), ("val", 2)):
        for label, name in enumerate(("blue", "green", "red")):
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 120, (32, 32, 3))
                pixels[..., 2 - label] += 100
                Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "photos" / part / name / f"{i}.png")
    command(
        "finetune", tmp_path / "photos", "--train", "lora", "--lora-rank", 4, "--out", tmp_path / "run",
        "--model", "vit_tiny_patch16_224", "--model-kwargs", "depth=2", "embed_dim=48", "num_heads=2",
        "--weights", weights, "--img-size", 32, "--epochs", 2, "--batch-size", 4, "--workers", 0, "--device", "cpu",
    )  # fmt: skip
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "run" / "adapter" / "README.md").read_text("utf-8"), re.S)
    found = foreign(f"""
import os
import torch
os.chdir("run/adapter")
{code}
os.chdir("../..")
with torch.no_grad():
    logits = model(torch.from_numpy(images)).numpy()
""")
    np.testing.assert_allclose(found, logits(tmp_path / "run" / "task", images), atol=1e-5)


def test_onnx_checks_an_export_and_plain_onnx_runtime_runs_it(foreign, record, pack, images, tmp_path):
    command("export", "onnx", pack, "--out", tmp_path / "out")
    found = foreign("""
import onnx, onnxruntime
onnx.checker.check_model("out/model.onnx", full_check=True)
session = onnxruntime.InferenceSession("out/model.onnx", providers=["CPUExecutionProvider"])
logits, = session.run(["logits"], {"pixel_values": images})
""")
    np.testing.assert_allclose(found, logits(pack, images), atol=1e-4)
    record("ONNX Runtime", "`export onnx`: fp32", difference=off(found, logits(pack, images)))
