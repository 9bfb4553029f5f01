import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtk.card import BaseRef, Card, InputSpec, ModelSpec, Transform
from vtk.errors import DataError
from vtk.packs.load import card_metadata

CARD = Card(
    model=ModelSpec("vit_tiny_patch16_224", {"depth": 2}),
    input=InputSpec(32, 48, mean=(0.1, 0.2, 0.3), std=(0.5, 0.5, 0.5)),
    classes=("a", "ü b"),
    base=BaseRef("hub:x", "00ff"),
    transforms=(Transform("adapt_input", {"in_chans": 1}),),
    metrics={"top1": 0.5},
)


def test_a_card_survives_json() -> None:
    assert Card.from_json(CARD.to_json(), "here") == CARD


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "newer vtk"),
        ({"classes": "ab"}, "expected"),
        ({"classes": [1, 2]}, "expected str"),
        ({"unknown": 1}, "unknown key `unknown`"),
        ({"model": {"name": "x" * 9999}}, "`model.name` has 9,999 letters"),
        ({"input": {"height": 32}}, "`width` is missing"),
        ({"input": {"height": "32", "width": 32}}, "expected int, found '32'"),
        ({"input": {"height": 0, "width": 32}}, "impossible"),
        ({"input": {"height": 32, "width": 32, "std": [0.0, 1.0, 1.0]}}, "std above 0"),
        ({"input": {"height": 32, "width": 32, "mean": [0.5]}}, "3 values"),
        ({"input": {"height": 32, "width": 32, "resize_mode": "zoom"}}, "not one of crop, squash, pad"),
        ({"input": {"height": 32, "width": 32, "std": [float("nan")] * 3}}, "finite"),
        ({"input": {"height": 32, "width": 32, "mean": [float("inf")] * 3}}, "finite"),
        ({"input": {"height": 32, "width": 32, "crop_pct": 1e-9}}, "impossible"),
        ({"input": {"height": 32, "width": 32, "interpolation": "magic"}}, "known: bicubic, bilinear, nearest"),
        ({"model": None}, "expected an object"),
        ({"model": {"name": "x", "kwargs": {"checkpoint_path": "/etc/passwd"}}}, "must not have `checkpoint_path`"),
        ({"model": {"name": "x", "kwargs": {"pretrained": True}}}, "must not have `pretrained`"),
        ({"schema": 0}, "`schema` is 0"),
        ({"classes": []}, "one or more different names"),
        ({"classes": ["a", "a"]}, "one or more different names"),
        ({"metrics": {"top1": "high"}}, "`metrics.top1` is no number"),
        ({"regime": {"batch_size": 0}}, "`regime.batch_size` is 0"),
        ({"data": {"val_split": "x"}}, "`data` is impossible"),
        ({"data": {"val_split": 7}}, "`data` is impossible"),
        ({"pack": {"trained": 3}}, "`pack.trained`"),
        ({"input": {"height": 1 << 20, "width": 1 << 20}}, "larger than 67,108,864 pixels"),
        ({"model": {"name": "x", "kwargs": {"depth": 10**9}}}, "`model.kwargs.depth` is 1000000000; the largest"),
        ({"model": {"name": "x", "kwargs": {"a": [1, {"b": 1e9}]}}}, "largest number there is 65536"),
        ({"transforms": [{"op": "x", "args": {"layers": [1, 10**6]}}]}, "`transforms.x.layers` is"),
        ({"regime": {"batch_size": 10**9}}, "from 1 to 65536"),
        ({"classes": ["a\ud800"]}, "which is no text"),
    ],
)
def test_a_damaged_card_is_refused_with_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Card.from_dict(json.loads(CARD.to_json()) | change, "task.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(derandomize=True, deadline=None)
@given(st.sampled_from([f.name for f in dataclasses.fields(Card)]), json_values)
def test_any_json_in_any_field_gives_a_card_or_a_data_error(name: str, value: Any) -> None:
    try:
        Card.from_dict(json.loads(CARD.to_json()) | {name: value}, "fuzz")
    except DataError:
        pass


@pytest.mark.parametrize("text", ["", "[]", "null", "3", '{"schema": "1"}', "{" * 5000])
def test_what_is_no_card_is_said_to_be_none(text: str) -> None:
    with pytest.raises(DataError):
        Card.from_json(text, "x")


def test_class_names_that_are_no_utf_8_are_written_into_every_format() -> None:
    card = dataclasses.replace(CARD, classes=("a", "\udcff\udc80", "é"))
    card.to_json().encode()  # as safetensors and ONNX do
    assert Card.from_json(card.to_json(), "here") == card
    card_metadata(card)["vtk"].encode()
    assert "ü b" in CARD.to_json()
