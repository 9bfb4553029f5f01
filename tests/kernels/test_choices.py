import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vtk_kernels import choices, choose
from vtk_kernels.choices import ALLOWED, DEFAULT, read

CARD = "NVIDIA H100 80GB HBM3"
ENTRY = {
    "device": CARD, "torch": ".".join(torch.__version__.split(".")[:2]), "triton": "9.9", "op": "linear_gelu",
    "dtype": "bfloat16", "rows": 1576, "n": 3072, "k": 384, "choice": "aten",
}  # fmt: skip


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that puts entries in place of the package's."""
    real = choices._minor

    def put(*entries: dict[str, Any]) -> None:
        path = tmp_path / "choices.json"
        path.write_text(json.dumps({"schema": 1, "measured": entries}))
        monkeypatch.setattr(choices, "_PATH", path)
        choices._tables.cache_clear()
        choices._choose.cache_clear()

    monkeypatch.setattr(choices, "_minor", lambda module: "9.9" if module == "triton" else real(module))
    yield put
    choices._tables.cache_clear()
    choices._choose.cache_clear()


def ask(rows: int = 1576, n: int = 3072, k: int = 384, device: str | None = CARD, **other: Any) -> str:
    return choose(other.get("op", "linear_gelu"), rows, n, k, other.get("dtype", torch.bfloat16), device)


def test_the_packages_own_table_can_be_read() -> None:
    for entry in read(choices._PATH):
        assert entry["rows"] > 0 and entry["dtype"] in ("bfloat16", "float16")


@pytest.mark.parametrize("op", sorted(DEFAULT))
def test_defaults_hold_where_nothing_was_measured(op: str, table: Any) -> None:
    table()
    assert choose(op, 197, 384, 384, torch.bfloat16, None) == DEFAULT[op]
    assert choose(op, 197, 384, 384, torch.bfloat16, CARD) == DEFAULT[op]
    assert DEFAULT[op] in ALLOWED[op]


def test_documented_defaults() -> None:
    assert DEFAULT == {
        "linear_gelu": "triton", "splitk_linear": "aten", "packed_attention": "sdpa", "grouped_linear": "triton",
        "ln_folded": "separate",
    }  # fmt: skip


def test_an_entry_holds_for_what_it_was_measured_on_and_nothing_else(table: Any) -> None:
    table(ENTRY)
    assert ask() == "aten"
    for other in (
        {"n": 3073}, {"k": 385}, {"device": "another card"}, {"device": None}, {"dtype": torch.float16},
    ):  # fmt: skip
        assert ask(**other) == "triton", other
    assert ask(op="grouped_linear") == "triton"
    table({**ENTRY, "op": "ln_folded", "n": 384, "k": 3072, "choice": "folded"})
    assert ask(op="ln_folded", n=384, k=3072) == "folded"
    assert ask(op="ln_folded", n=384, k=1536) == "separate"


def test_what_was_measured_on_a_related_card_or_version_holds_until_this_one_is(table: Any) -> None:
    for field, value in (("torch", "1.0"), ("triton", "1.0"), ("device", "NVIDIA H200")):
        table({**ENTRY, field: value})
        assert ask() == "aten", field
        table({**ENTRY, field: value}, {**ENTRY, "choice": "triton"})
        assert ask() == "triton", field
    old, new = {**ENTRY, "torch": "2.9", "choice": "triton"}, {**ENTRY, "torch": "2.10"}
    for entries in ((old, new), (new, old)):
        table(*entries)
        assert ask(device="NVIDIA H200") == "aten"
    table({**ENTRY, "device": "NVIDIA A100-SXM4-80GB"})
    assert ask() == "triton"


def test_the_nearest_measured_number_of_rows_decides_up_to_a_factor_of_two(table: Any) -> None:
    table({**ENTRY, "rows": 100}, {**ENTRY, "rows": 400, "choice": "triton"}, {**ENTRY, "rows": 4000})
    assert [ask(rows) for rows in (50, 100, 190, 210, 800, 2000, 8000)] == [
        "aten", "aten", "aten", "triton", "triton", "aten", "aten",
    ]  # fmt: skip
    table({**ENTRY, "rows": 100})
    assert [ask(rows) for rows in (0, 49, 50, 200, 201)] == ["triton", "triton", "aten", "aten", "triton"]


def test_an_operation_without_a_choice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`op` \('norm'\) has no choice; these have: grouped_linear, linear_gelu"):
        choose("norm", 1, 1, 1, torch.bfloat16, None)


@pytest.mark.parametrize(
    "text,said",
    [
        ("[]", "no choice table: TypeError"),
        ("{", "no choice table: JSONDecodeError"),
        ('{"schema": 2, "measured": []}', "schema 2, this version reads 1"),
        (json.dumps({"schema": 1, "measured": [{**ENTRY, "choice": "magic"}]}), r"`choice` \('magic'\) must be one of"),
        (json.dumps({"schema": 1, "measured": [{**ENTRY, "op": "norm"}]}), "KeyError: 'norm'"),
        (json.dumps({"schema": 1, "measured": [{"op": "linear_gelu", "choice": "aten"}]}), "KeyError: 'device'"),
        (json.dumps({"schema": 1, "measured": [ENTRY, {**ENTRY, "choice": "triton"}]}), "two entries with the same"),
    ],
)
def test_a_table_that_cannot_be_used_says_why(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read(path)


def test_no_card_is_asked_for_its_name_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: pytest.fail("asked"))
    assert choices.device_name(torch.ones(1)) is None
    assert choose("packed_attention", 8, 197, 12, torch.bfloat16, None) == "sdpa"
