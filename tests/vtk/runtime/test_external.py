"""Where the weights of an ONNX file lie: whatever the file says, only whole files beside it are taken."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from vtk.errors import DataError
from vtk.runtime.opening import open_source

EXPORT = Path(__file__).resolve().parents[2] / "fixtures" / "v0_1" / "exports" / "files"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An export whose weights lie beside it."""
    shutil.copytree(EXPORT, tmp_path / "e")
    return tmp_path / "e" / "digits.onnx"


def stored(proto: onnx.ModelProto) -> Any:
    return next(tensor for tensor in proto.graph.initializer if tensor.external_data)


def entry(key: str, value: str | None) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        tensor = stored(proto)
        left = [one for one in tensor.external_data if one.key != key]
        del tensor.external_data[:]
        tensor.external_data.extend(left)
        if value is not None:
            tensor.external_data.add(key=key, value=value)

    return change


def nowhere(proto: onnx.ModelProto) -> None:
    del stored(proto).external_data[:]


def in_constant(proto: onnx.ModelProto) -> None:
    node = onnx.helper.make_node("Constant", [], ["c"], value=stored(proto))
    next(a for a in node.attribute if a.name == "value").t.external_data.add(key="location", value="../x")
    branch = onnx.helper.make_graph([node], "branch", [], [])
    proto.graph.node.append(onnx.helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch))


def in_sparse(proto: onnx.ModelProto) -> None:
    proto.graph.sparse_initializer.add().values.external_data.add(key="location", value="/etc/hostname")


def in_function(proto: onnx.ModelProto) -> None:
    node = onnx.helper.make_node("Constant", [], ["c"], value=stored(proto))
    next(a for a in node.attribute if a.name == "value").t.external_data.add(key="location", value="gone.data")
    proto.functions.add(name="f").node.append(node)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (entry("location", None), "does not say in which file"),
        (entry("location", ""), "does not say in which file"),
        (nowhere, "does not say in which file"),
        (entry("location", "../secret.data"), "not beside it"),
        (entry("location", "a/../../secret.data"), "not beside it"),
        (entry("location", "/etc/hostname"), "not beside it"),
        (entry("location", "..\\secret.data"), "not beside it"),
        (entry("location", "C:\\x"), "not beside it"),
        (entry("location", "a\0b"), "not beside it"),
        (entry("location", "gone.data"), "not beside it"),
        (entry("location", "."), "not beside it"),
        (entry("offset", "-4"), "offset '-4', which is no number of bytes"),
        (entry("offset", "9" * 5000), "no number of bytes"),
        (entry("offset", str(1 << 63)), "no number of bytes"),
        (entry("offset", "x"), "no number of bytes"),
        (entry("offset", "٣"), "no number of bytes"),
        (entry("length", "-1"), "length '-1', which is no number"),
        (entry("length", "99999999"), "bytes, digits.onnx needs"),
        (entry("offset", "26624"), "bytes, digits.onnx needs"),
        (in_constant, "not beside it"),
        (in_sparse, "not beside it"),
        (in_function, "not beside it"),
    ],
)
def test_what_a_file_says_of_its_weights_is_checked(
    file: Path, change: Callable[[onnx.ModelProto], None], match: str
) -> None:
    (file.parent.parent / "secret.data").write_bytes(b"\0" * 99_999)
    proto = onnx.load(file, load_external_data=False)
    change(proto)
    file.write_bytes(proto.SerializeToString())
    with pytest.raises(DataError, match=match) as caught:
        open_source(file)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_links_are_followed_within_the_folder_that_the_model_really_lies_in(file: Path, tmp_path: Path) -> None:
    data = next(file.parent.glob("*.data"))
    cached = tmp_path / "cache"  # as the hub's cache: both are links to one folder
    cached.mkdir()
    for name in (file.name, data.name):
        (cached / name).symlink_to(file.parent / name)
    assert open_source(cached / file.name).card.classes
    (tmp_path / "elsewhere").mkdir()
    shutil.move(data, tmp_path / "elsewhere" / "x")
    data.symlink_to(tmp_path / "elsewhere" / "x")
    with pytest.raises(DataError, match="is a link to a file outside of its folder"):
        open_source(file)
    data.unlink()
    os.mkfifo(data)
    with pytest.raises(DataError, match="not beside it"):
        open_source(file)


@pytest.mark.parametrize(
    ("name", "axis", "side"),
    [
        ("logits", 1, 1 << 40),
        ("logits", 1, -3),
        ("pixel_values", 1, 1 << 40),
        ("pixel_values", 2, 1 << 40),
        ("pixel_values", 3, -8),
    ],
)
def test_a_file_without_a_card_that_claims_no_end_of_classes_or_pixels_is_refused(
    file: Path, name: str, axis: int, side: int
) -> None:
    proto = onnx.load(file, load_external_data=False)
    del proto.metadata_props[:]
    file.write_bytes(proto.SerializeToString())
    assert not open_source(file).described
    value = next(v for v in (*proto.graph.input, *proto.graph.output) if v.name == name)
    value.type.tensor_type.shape.dim[axis].dim_value = side
    file.write_bytes(proto.SerializeToString())
    with pytest.raises(DataError, match="was it damaged"):
        open_source(file)
