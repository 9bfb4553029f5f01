"""The four commands on the command line: what they print as JSON, and one line for a mistake."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vtk.__main__ import main
from vtk.packs import load_task

Make = Callable[..., Path]


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    code = main([*map(str, argv), "--json"])
    out = json.loads(capsys.readouterr().out)
    assert code == out.get("exit_code", 0)
    return out


def test_bundle_and_convert(make_pack: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack = make_pack()
    made = run(capsys, "tasks", "bundle", pack, "--out", tmp_path / "b.vtkbundle")
    assert made["bundle_bytes"] > made["base_bytes"] > 0
    small = run(capsys, "tasks", "convert", pack, "--pack-dtype", "int8", "--out", tmp_path / "small")
    assert small["drift"]["logits_cosine"] > 0.999 and small["pack_dtype"] == "int8"
    listed = run(capsys, "tasks", "list", tmp_path)
    assert {Path(p["path"]).name for p in listed["packs"]} == {"pack", "b.vtkbundle", "small"}
    merged = run(capsys, "tasks", "merge", tmp_path / "b.vtkbundle", "--out", tmp_path / "m.safetensors")
    assert merged["classes"] == ["c0", "c1", "c2"]
    assert run(capsys, "tasks", "bundle", pack, "--out", tmp_path / "b.vtkbundle")["exit_code"] == 2
    assert run(capsys, "tasks", "convert", pack, "--pack-dtype", "int4", "--out", tmp_path / "x")["exit_code"] == 2


def test_to_peft_and_back(make_pack: Make, base_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    pack = make_pack()
    made = run(capsys, "tasks", "to-peft", pack, "--out", tmp_path / "peft")
    assert made["in_base"] == ["pos_embed"] and made["max_difference"] <= 1e-6 and "PeftModel" in made["code"]
    back = run(capsys, "tasks", "from-peft", tmp_path / "peft", "--out", tmp_path / "again")
    assert "blocks.0.attn.qkv.weight" in back["trained"]
    (tmp_path / "names.txt").write_text("cat\ndog\nowl\n")
    flags = ["--model", "vit_tiny_patch16_224", "--model-kwargs", "depth=2", "embed_dim=48", "num_heads=2"]
    back = run(
        capsys, "tasks", "from-peft", tmp_path / "peft", "--out", tmp_path / "named", *flags,
        "--img-size", "32", "--classes", tmp_path / "names.txt", "--base", tmp_path / "peft" / "base.safetensors",
    )  # fmt: skip
    assert load_task(tmp_path / "named").card.classes == ("cat", "dog", "owl")
    assert run(capsys, "tasks", "to-peft", pack, "--out", tmp_path / "x", "--adapter-only")["exit_code"] == 2
    wrong = run(capsys, "tasks", "from-peft", tmp_path, "--out", tmp_path / "x", "--base", base_file)
    assert wrong["exit_code"] == 3 and "is not an adapter" in wrong["error"]
