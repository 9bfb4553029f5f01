"""build.sh and compare.sh say what the graph is, and a shell reads them as they were meant."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

from tests.export.tensorrt._graphs import make_graph
from vtk.errors import UsageError
from vtk_export.tensorrt import scripts
from vtk_export.tensorrt.config import parse_version


def profile(name: str = "pixel_values", trt: str = "10.x", batch: Any = "batch", **more: Any) -> dict[str, Any]:
    shapes = [batch, 3, 32, 48]
    proto = make_graph([helper.make_node("Erf", [name], ["y"])], inputs={name: (TensorProto.FLOAT, shapes)})
    options: dict[str, Any] = {"precision": "fp32", "tf32": True, "workspace": 512, **more}
    return scripts.profile(proto, parse_version(trt), (1, 4, 16), **options)


def words(script: str) -> list[list[str]]:
    """Return the command lines of a script, split as a shell splits them."""
    lines = script.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith(("trtexec", "polygraphy"))]


def flags(line: list[str]) -> dict[str, str]:
    return dict(word.removeprefix("--").partition("=")[::2] for word in line[1:])


def test_shapes_and_files_are_those_of_the_graph() -> None:
    found = flags(words(scripts.build_script(profile()))[0])
    assert (found["onnx"], found["saveEngine"]) == ("model.onnx", "model.engine")
    ranges = {which: found[f"{which}Shapes"] for which in ("min", "opt", "max")}
    assert ranges == {
        "min": "pixel_values:1x3x32x48",
        "opt": "pixel_values:4x3x32x48",
        "max": "pixel_values:16x3x32x48",
    }
    assert (found["memPoolSize"], found["timingCacheFile"]) == ("workspace:512", "timing.cache")
    assert "skipInference" in found
    assert not {"fp16", "bf16", "int8", "best", "noTF32"} & set(found)


def test_a_fixed_batch_has_no_shapes() -> None:
    assert not any("Shapes" in flag for flag in flags(scripts.trtexec(profile(batch=2))))
    assert profile(batch=2)["inputs"]["pixel_values"]["max"] == [2, 3, 32, 48]


@pytest.mark.parametrize(("trt", "typed"), [("10.3", True), ("11.x", False), ("8.6", False)])
def test_typing_is_asked_for_where_it_is_a_choice(trt: str, typed: bool) -> None:
    assert ("stronglyTyped" in flags(scripts.trtexec(profile(trt=trt)))) == typed
    assert profile(trt=trt)["strongly_typed"] == (trt != "8.6")


def test_tf32_can_be_ruled_out_and_tolerances_follow() -> None:
    assert "noTF32" in flags(scripts.trtexec(profile(tf32=False)))
    for options, bound in (({}, "0.01"), ({"tf32": False}, "0.0001"), ({"precision": "bf16"}, "0.1")):
        _, engine = scripts.polygraphy(profile(**options))
        assert engine[engine.index("--atol") + 1] == bound
    assert ["--providers", "cuda"] == scripts.polygraphy(profile(precision="bf16"))[0][4:6]


def test_polygraphy_gives_both_the_same_images() -> None:
    here, engine = words(scripts.compare_script(profile()))
    assert here[:4] == ["polygraphy", "run", "model.onnx", "--onnxrt"]
    assert here[here.index("--input-shapes") + 1] == "pixel_values:[4,3,32,48]"
    assert engine[2:6] == ["model.engine", "--model-type", "engine", "--trt"]
    for save, load in (("--save-inputs", "--load-inputs"), ("--save-outputs", "--load-outputs")):
        assert here[here.index(save) + 1] == engine[engine.index(load) + 1]


@pytest.mark.parametrize("name", ["input:0", "a b", "$(touch x)", "x;reboot", "`id`", "né"])
def test_a_strange_name_stays_one_word(name: str) -> None:
    found = flags(words(scripts.build_script(profile(name)))[0])
    assert found["minShapes"] == f"'{name}':1x3x32x48"
    assert f"'{name}':[4,3,32,48]" in words(scripts.compare_script(profile(name)))[0]


@pytest.mark.parametrize("name", ["a,b", "it's", "a\nb", 'a"b', "a[0]"])
def test_a_name_that_trtexec_cannot_read_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="rename it") as error:
        scripts.build_script(profile(name))
    assert "\n" not in str(error.value)


def test_open_axes_other_than_the_batch_are_refused() -> None:
    inputs = {"x": (TensorProto.FLOAT, ["batch", "tokens"])}
    proto = make_graph([helper.make_node("Erf", ["x"], ["y"])], inputs=inputs)
    with pytest.raises(UsageError, match="open axes besides the batch"):
        scripts.profile(proto, parse_version("10"), (1, 1, 1), precision="fp32", tf32=True, workspace=1)


@pytest.mark.skipif(os.name == "nt", reason="a script for bash")
def test_bash_runs_it_from_anywhere_with_the_same_words(tmp_path: Path) -> None:
    folder = tmp_path / "it's $(touch hit) & more"
    folder.mkdir()
    fake = tmp_path / "bin" / "trtexec"
    fake.parent.mkdir()
    fake.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$PWD" trtexec "$@" > log\n')
    fake.chmod(0o755)
    (folder / "build.sh").write_text(scripts.build_script(profile("$(touch hit)")))
    env = {"PATH": f"{fake.parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", str(folder / "build.sh")], check=True, env=env, cwd=tmp_path)
    where, *line = (folder / "log").read_bytes().decode().split("\0")[:-1]
    assert (Path(where), line) == (folder, scripts.trtexec(profile("$(touch hit)")))
    assert not (tmp_path / "hit").exists()
    assert not (folder / "hit").exists()
