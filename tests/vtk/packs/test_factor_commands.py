"""Commands on packs of factors: they run the merged model, and say what is stored; version 0.1 refuses them."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

from tests.vtk.packs._fake_hub import FakeHub
from vtk.__main__ import main
from vtk.packs import load_task, merge_task
from vtk.packs.cards import CARD, TENSORS, read_card
from vtk.packs.factors import read_pack
from vtk.packs.hub import pull_task, push_task
from vtk.packs.pack import update_card

Make = Callable[..., Path]
REPO = Path(__file__).resolve().parents[3]


def test_the_list_shows_ranks_and_the_drop(
    make_factors: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    even, mixed = make_factors("even", rank=(0, 4, 4, 4, 4)), make_factors("mixed", rank=(1, 4), dtype="int8")
    judged = {"compression": {"judged": {"drop": 0.0042}, "mean_rank": 1e4}}  # which is no mean of ranks of 4
    update_card(even, dataclasses.replace(card := read_card(even), pack={**card.pack, **judged}))
    weighed = {"compression": {"mean_rank": 3.3}}
    update_card(mixed, dataclasses.replace(card := read_card(mixed), pack={**card.pack, **weighed}))
    assert main(["tasks", "list", str(tmp_path), "--json"]) == 0
    listed = {Path(pack["path"]).name: pack for pack in json.loads(capsys.readouterr().out)["packs"]}
    assert listed["even"]["rank"] == {"matrices": 4, "low": 4, "mean": 4.0, "high": 4}
    assert listed["even"]["drop"] == 0.0042
    assert listed["mixed"]["rank"] == {"matrices": 5, "low": 1, "mean": 3.3, "high": 4}
    assert listed["even-full"]["rank"] is None and listed["mixed"]["drop"] is None
    assert listed["mixed"]["pack_bytes"] == sum(file.stat().st_size for file in mixed.iterdir())
    assert main(["tasks", "list", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "3.3 (1-4)" in shown and "0.42" in shown and "drop in points" in shown
    (mixed / CARD).write_text((mixed / CARD).read_text().replace('"rank": 1', '"rank": -1'))
    assert main(["tasks", "list", str(tmp_path)]) == 0
    assert "it is from 0 to 65536" in capsys.readouterr().err


def test_factors_travel_over_the_hub(
    make_factors: Make, base_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, pack = FakeHub(monkeypatch), make_factors(rank=2, dtype="int8")
    push_task(pack, "me/pets")
    page = hub.files("me/pets")["README.md"].decode()
    assert "5 matrices of them as low-rank factors" in page and "- factors: 5 matrices, rank 2, in `int8`" in page
    pull_task("me/pets", tmp_path / "here")
    assert (tmp_path / "here" / TENSORS).read_bytes() == (pack / TENSORS).read_bytes()
    a, b = load_task(tmp_path / "here", base=base_file).model, load_task(pack).model
    assert all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())
    push_task(pack, "me/whole", with_base=True)
    base_file.unlink()
    pull_task("me/whole", tmp_path / "whole")
    assert load_task(tmp_path / "whole").bundled
    assert read_pack(tmp_path / "whole").factors.keys() == read_pack(pack).factors.keys()


@pytest.mark.slow
def test_other_commands_run_the_merged_model(
    make_factors: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = make_factors()
    for name in load_task(pack).classes:
        (tmp_path / "data" / name).mkdir(parents=True)
        pixels = np.random.default_rng(len(name)).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "data" / name / "a.png")
    task = load_task(pack)
    image = next((tmp_path / "data").rglob("a.png"))
    with torch.inference_mode():
        logits = task.model(task.transform(image)[None])

    def run(*words: object) -> Any:
        code = main([*map(str, words), "--json"])
        out = capsys.readouterr().out
        assert code == 0, out
        return json.loads(out.splitlines()[-1])

    top = run("predict", pack, image)["predictions"][0]["scores"][0]
    assert top == pytest.approx(float(logits.softmax(-1).max()), abs=1e-5)
    assert run("eval", pack, tmp_path / "data")["count"] == 3
    run("export", "onnx", pack, "--out", tmp_path / "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    found = session.run(None, {session.get_inputs()[0].name: task.transform(image)[None].numpy()})[0]
    assert np.abs(found - logits.numpy()).max() < 1e-5
    card = json.loads((tmp_path / "onnx" / "model.json").read_text())
    assert card["schema"] == 1 and card["pack"] == {}  # an older vtk reads it


OLD = """
import sys
from pathlib import Path
import vtk
assert Path(vtk.__file__).parents[1] == Path(sys.argv[1])
from vtk.errors import DataError
from vtk.tasks import load_checkpoint, load_task, read_card
for read in (load_task, read_card):
    try:
        read(Path(sys.argv[2]))
    except DataError as error:
        print(error)
load_checkpoint(Path(sys.argv[3]))
"""


@pytest.mark.slow
def test_version_0_1_refuses_factors_in_one_line_and_reads_what_is_merged(
    make_factors: Make, base_file: Path, tmp_path: Path
) -> None:
    """Its own code, from the history of this repository, is what decides."""
    commit = (REPO / "tests" / "fixtures" / "v0_1" / "README.md").read_text().split("commit ")[1].split()[0]
    packed = subprocess.run(["git", "-C", REPO, "archive", commit, "vtk", "kernels"], capture_output=True)
    if packed.returncode:
        pytest.skip("this copy has no history of version 0.1")
    old, pack = tmp_path / "old", make_factors()
    old.mkdir()
    subprocess.run(["tar", "-x", "-C", old], input=packed.stdout, check=True)
    merge_task(pack, tmp_path / "m.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", OLD, old, pack, tmp_path / "m.safetensors"], capture_output=True, text=True, check=True,
        cwd=old, env={**os.environ, "PYTHONPATH": f"{old}{os.pathsep}{old / 'kernels'}"},
    )  # fmt: skip
    line = f"{pack / CARD} was written by a newer vtk (schema 2, this one reads 1); upgrade vtk"
    assert done.stdout.splitlines() == [line, line]
