"""Packs that someone built to do harm, or that a disk mixed up: one line, soon, and nothing is run or fetched."""

import json
import os
import pickle
import socket
import struct
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from vtk.errors import DataError, VtkError
from vtk.formats import save_tensors
from vtk.models.weights.sources import read_base
from vtk.packs import load_checkpoint, load_task, merge_task, read_card
from vtk.packs.cards import CARD, HASHES, TENSORS

Files = dict[str, bytes]
few = settings(
    derandomize=True, max_examples=16, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def good(shared_pack: Path) -> Files:
    return {name: (shared_pack / name).read_bytes() for name in (CARD, HASHES, TENSORS)}


@pytest.fixture
def pack(good: Files, tmp_path: Path) -> Path:
    return fill(tmp_path / "pack", good)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is asked for nothing here: without an address its client does not even try."""

    def unknown(*_: Any, **__: Any) -> Any:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def fill(folder: Path, contents: Files) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return folder


def refused(action: Callable[[], object], match: str = ".") -> None:
    with pytest.raises(VtkError, match=match) as caught:
        action()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1500


def edit(pack: Path, **changes: Any) -> Path:
    card = json.loads((pack / CARD).read_text())
    (pack / CARD).write_text(json.dumps(card | changes))
    return pack


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and body of a safetensors file."""
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header: dict[str, Any] | bytes, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def changed(**entry: Any) -> Callable[[dict[str, Any], bytes], bytes]:
    return lambda header, body: joined({**header, "head.bias": {**header["head.bias"], **entry}}, body)


HEADERS: dict[str, Callable[[dict[str, Any], bytes], bytes]] = {
    "header of 2**62 bytes": lambda header, body: struct.pack("<Q", 1 << 62) + b"{}" + body,
    "header longer than the file": lambda header, body: struct.pack("<Q", 100_000_001) + b"{}" + body,
    "no bytes": lambda header, body: b"",
    "seven bytes": lambda header, body: b"1234567",
    "no text": lambda header, body: joined(b"\xff" * 64, body),
    "deep": lambda header, body: joined(b"[" * 90_000, body),
    "rather deep": lambda header, body: joined(b'{"a":' * 200 + b"1" + b"}" * 200, body),
    "a name twice": lambda header, body: joined(
        json.dumps(header).encode()[:-1] + b',"head.bias":' + json.dumps(header["head.bias"]).encode() + b"}", body
    ),
    "negative offset": changed(data_offsets=[-4, 8]),
    "shared bytes": changed(data_offsets=[0, 12]),
    "beyond the end": changed(data_offsets=[1 << 40, (1 << 40) + 12]),
    "shape that overflows": changed(shape=[1 << 40, 1 << 40]),
    "unknown dtype": changed(dtype="X9"),
    "dtype of six bits": changed(dtype="F6_E2M3"),
    "dtype of eight bytes": changed(dtype="F64"),
    "a pickle": lambda header, body: pickle.dumps({"head.bias": [1.0, 2.0]}),
}


@pytest.mark.parametrize("make", HEADERS.values(), ids=HEADERS.keys())
def test_headers_of_tensors(good: Files, pack: Path, make: Callable[[dict[str, Any], bytes], bytes]) -> None:
    (pack / TENSORS).write_bytes(make(*parts(good[TENSORS])))
    refused(lambda: load_task(pack), "not a whole safetensors file")


TENSORS_OF = {
    "path": ({"../../etc/passwd": torch.zeros(1)}, "`../../etc/passwd`, which its model does not have"),
    "absolute path": ({"/etc/passwd": torch.zeros(1)}, "which its model does not have"),
    "no name": ({"": torch.zeros(1)}, "which its model does not have"),
    "eight bits": ({"head.bias": torch.zeros(3).to(torch.float8_e4m3fn)}, "holds torch.float8_e4m3fn"),
    "complex": ({"head.bias": torch.zeros(3, dtype=torch.complex64)}, "holds torch.complex64"),
    "integers": ({"head.bias": torch.zeros(3, dtype=torch.int64)}, "holds torch.int64"),
    "NaN": ({"head.bias": torch.tensor([0.0, float("nan"), 0.0])}, "`head.bias` holds numbers that are not finite"),
    "infinity": ({"head.bias": torch.tensor([0.0, float("inf"), 0.0])}, "not finite"),
}


@pytest.mark.parametrize(("tensors", "match"), TENSORS_OF.values(), ids=TENSORS_OF.keys())
def test_tensors(pack: Path, tensors: dict[str, torch.Tensor], match: str) -> None:
    save_tensors(pack / TENSORS, load_file(pack / TENSORS) | tensors)
    refused(lambda: load_task(pack), match)


SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 2}
CARDS: dict[str, tuple[dict[str, Any], str]] = {
    "depth": ({"depth": 100_000}, r"`model.kwargs.depth` is 100000; the largest number there is 256"),
    "width": ({"embed_dim": 1 << 30}, "the largest number there is 65536"),
    "a code object": ({"block_fn": "os.system"}, "timm cannot build"),
    "a layer that is not there": ({"act_layer": "x"}, "timm cannot build"),
    "text for a number": ({"depth": "2"}, "timm cannot build"),
    "below nothing": ({"depth": -1}, "timm cannot build"),
    "a file to read": ({"checkpoint_path": "/etc/passwd"}, "must not have `checkpoint_path`"),
}


@pytest.mark.parametrize(("kwargs", "match"), CARDS.values(), ids=CARDS.keys())
def test_arguments_of_a_card(pack: Path, kwargs: dict[str, Any], match: str) -> None:
    name = json.loads((pack / CARD).read_text())["model"]["name"]
    refused(lambda: load_task(edit(pack, model={"name": name, "kwargs": SMALL | kwargs})), match)


@pytest.mark.parametrize("name", ["../../etc", "/etc/passwd", "local-dir:/etc", "hf-hub:someone/thing", "", "a\0b"])
def test_names_of_models(pack: Path, name: str) -> None:
    refused(lambda: load_task(edit(pack, model={"name": name, "kwargs": {}})))


@pytest.mark.parametrize("source", ["/dev/zero", "a" * 5000, "\0", "../" * 99, "hub:../../x"])
def test_where_a_card_says_its_base_is(pack: Path, source: str) -> None:
    base = json.loads((pack / CARD).read_text())["base"]
    refused(lambda: load_task(edit(pack, base={**base, "source": source})), "no base")


def test_a_base_id_leads_to_no_other_folder(pack: Path) -> None:
    refused(lambda: load_task(edit(pack, base={"source": "x", "id": "../../../x"})), "name different bases")


def test_a_model_far_larger_than_its_tensors_is_not_built(pack: Path, tmp_path: Path, monkeypatch) -> None:
    """A million classes, in a card of ten megabytes, would take gigabytes for the classifier."""
    merge_task(pack, tmp_path / "m.safetensors")
    many = {"classes": [str(i) for i in range(60_000)]}
    monkeypatch.setattr("vtk.packs.load.build_model", lambda *_, **__: pytest.fail("it was built"))
    refused(lambda: load_task(edit(pack, **many)), "asks for a model of .* numbers, the file and its base hold")
    card = json.dumps(json.loads((pack / CARD).read_text()))
    save_tensors(tmp_path / "m.safetensors", load_file(tmp_path / "m.safetensors"), {"vtk": card})
    refused(lambda: load_checkpoint(tmp_path / "m.safetensors"), "asks for a model of .* numbers")


INPUTS = {"pixels": {"height": 1 << 20, "width": 1 << 20}, "channels": {"in_chans": 1 << 20}}


@pytest.mark.parametrize("change", INPUTS.values(), ids=INPUTS.keys())
def test_sizes_of_a_card(pack: Path, change: dict[str, int]) -> None:
    size = json.loads((pack / CARD).read_text())["input"]
    refused(lambda: load_task(edit(pack, input=size | change)), "larger than 67,108,864 pixels or 1024 channels")


TEXTS = {
    "a key twice": (lambda text: text.rstrip()[:-1] + ', "x": "", "x": "y"}', "key 'x' is there twice"),
    "deep": (lambda text: "[" * 5000 + "]" * 5000, "not valid JSON|more than 64 levels"),  # Python 3.13 parses so deep
    "rather deep": (lambda text: '{"schema": ' + "[" * 80 + "]" * 80 + "}", "more than 64 levels"),
    "digits": (lambda text: '{"schema": ' + "9" * 9999 + "}", "not valid JSON"),
    "no text": (lambda text: "\udcff\udcfe", "not valid JSON"),
    "half a letter": (lambda text: text.replace('"c0"', '"\\ud800"'), "which is no text"),
}


FAULTS = [(CARD, fault) for fault in TEXTS] + [(HASHES, fault) for fault in TEXTS if fault != "half a letter"]
"""Only the card has names of classes."""


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_json(pack: Path, name: str, fault: str) -> None:
    make, match = TEXTS[fault]
    text = (pack / name).read_text()
    data = make(text).encode("utf-8", "surrogateescape")
    assert data != text.encode()
    (pack / name).write_bytes(data)
    refused(lambda: load_task(pack), match)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files")
@pytest.mark.parametrize("name", [CARD, HASHES, TENSORS])
@pytest.mark.parametrize("kind", ["pipe", "endless", "folder", "dangling"])
def test_what_is_no_plain_file(pack: Path, name: str, kind: str) -> None:
    """Reading a pipe would wait for ever, reading a device never end."""
    file = pack / name
    file.unlink()
    {
        "pipe": lambda: os.mkfifo(file),
        "endless": lambda: file.symlink_to("/dev/zero"),
        "folder": file.mkdir,
        "dangling": lambda: file.symlink_to(pack / "nowhere"),
    }[kind]()
    refused(lambda: load_task(pack))
    refused(lambda: read_card(pack / "no" if name != CARD else pack))


def test_pickles_are_not_run(pack: Path, tmp_path: Path, small: tuple[str, dict[str, Any]]) -> None:
    class Shell:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "pwned"),)

    data = pickle.dumps(Shell(), protocol=2)
    (pack / TENSORS).write_bytes(data)
    refused(lambda: load_task(pack), "not a whole safetensors file")
    for name in ("w.pth", "w.bin", "w.pt", "w.safetensors"):
        (tmp_path / name).write_bytes(data)
        refused(lambda name=name: read_base(*small, tmp_path / name))
    torch.save({"state_dict": {"x": Shell()}}, tmp_path / "z.pth")
    refused(lambda: read_base(*small, tmp_path / "z.pth"), "has Python objects besides tensors")
    assert not (tmp_path / "pwned").exists()


@few
@given(st.sampled_from([CARD, HASHES, TENSORS]), st.data())
def test_any_changed_bytes_load_or_are_refused(good: Files, tmp_path: Path, name: str, data: st.DataObject) -> None:
    contents = bytearray(good[name])
    for _ in range(data.draw(st.integers(1, 4))):
        # the beginning, where headers are, is the interesting part
        place = data.draw(st.integers(0, min(len(contents) - 1, 4000)))
        kind = data.draw(st.sampled_from(["set", "insert", "cut"]))
        if kind == "set":
            contents[place] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            contents[place:place] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            del contents[place : place + data.draw(st.integers(1, 500))]
        if not contents:
            break
    folder = fill(tmp_path / "pack", {**good, name: bytes(contents)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a changed letter can ask timm for an old name, of which it warns
        try:
            load_task(folder)
        except VtkError as error:
            assert "\n" not in str(error)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 1 << 70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@few
@given(st.sampled_from(["depth", "embed_dim", "mlp_ratio", "qkv_bias", "init_values", "class_token", "x"]), values)
def test_any_argument_of_a_model_loads_or_is_refused(good: Files, tmp_path: Path, name: str, value: Any) -> None:
    folder = fill(tmp_path / "pack", good)
    model = json.loads(good[CARD])["model"]
    try:
        load_task(edit(folder, model={**model, "kwargs": SMALL | {name: value}}))
    except VtkError as error:
        assert "\n" not in str(error)


@few
@given(
    st.sampled_from(["parallelize", "add_context_broadcast", "adapt_input", "replace_stem"]),
    st.text(max_size=8),
    values,
)
def test_any_transform_loads_or_is_refused(good: Files, tmp_path: Path, op: str, name: str, value: Any) -> None:
    folder = fill(tmp_path / "pack", good)
    known = {"parallelize": "branches", "add_context_broadcast": "layers", "adapt_input": "in_chans"}
    arguments = {known.get(op, name): value} if name < "m" else {name: value}
    try:
        load_task(edit(folder, transforms=[{"op": op, "args": arguments}]))
    except DataError as error:
        assert "\n" not in str(error)
