import importlib.util
import json
import math
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vtk_kernels import choices, choose
from vtk_kernels.choices import ALLOWED, DEFAULT, ChoiceTableError, device_name, explain, layers, read, text, use

CARD = "NVIDIA H100 80GB HBM3"
ENTRY = {
    "device": CARD, "torch": ".".join(torch.__version__.split(".")[:2]), "triton": "9.9", "op": "linear_gelu",
    "dtype": "bfloat16", "rows": 1576, "n": 3072, "k": 384, "choice": "aten",
}  # fmt: skip
ATTENTION = {**ENTRY, "op": "packed_attention", "rows": 4, "n": 197, "k": 12, "choice": "triton"}
PACKAGES = choices._LAYERS.path


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that puts entries in place of the package's."""
    real = choices._minor

    def put(*entries: dict[str, Any]) -> None:
        path = tmp_path / "package.json"
        path.write_text(json.dumps({"schema": 1, "measured": entries}))
        monkeypatch.setattr(choices._LAYERS, "path", path)
        use(None)

    monkeypatch.delenv("VTK_CHOICES", raising=False)
    monkeypatch.setattr(choices, "_minor", lambda module: "9.9" if module == "triton" else real(module))
    use(None)
    yield put
    monkeypatch.undo()
    use(None)


def ask(rows: int = 1576, n: int = 3072, k: int = 384, device: str | None = CARD, **other: Any) -> str:
    return choose(other.get("op", "linear_gelu"), rows, n, k, other.get("dtype", torch.bfloat16), device)


def test_the_packages_own_table_can_be_read() -> None:
    for entry in read(PACKAGES):
        assert entry["rows"] > 0 and entry["dtype"] in ("bfloat16", "float16")
    assert text(read(PACKAGES)) == PACKAGES.read_text(encoding="utf-8")


@pytest.mark.parametrize("op", sorted(DEFAULT))
def test_defaults_hold_where_nothing_was_measured(op: str, table: Any) -> None:
    table()
    assert choose(op, 197, 384, 384, torch.bfloat16, None) == DEFAULT[op]
    assert choose(op, 197, 384, 384, torch.bfloat16, "a card") == DEFAULT[op]
    assert choose(op, 12608, 384, 384, torch.bfloat16, CARD) == DEFAULT[op]
    assert DEFAULT[op] in ALLOWED[op]


def test_documented_defaults() -> None:
    assert DEFAULT == {
        "linear_gelu": "triton", "splitk_linear": "aten", "packed_attention": "sdpa", "grouped_linear": "triton",
        "grouped_low_rank": "separate",
        "kept_attention": "flash", "linear_residual": "whole", "ln_folded": "separate", "residual": "separate",
        "rotary_attention": "triton", "linear_swiglu": "triton",
    }  # fmt: skip


def test_an_entry_holds_for_its_operation_and_family_of_cards_alone(table: Any) -> None:
    table(ENTRY)
    assert ask() == "aten" and explain("linear_gelu", 1576, 3072, 384, torch.bfloat16, CARD).differs == ()
    for other in ({"device": "another card"}, {"device": None}, {"dtype": torch.float32}, {"dtype": torch.int8}):
        assert ask(**other) == "triton", other
    assert ask(op="grouped_linear") == "triton"


def test_what_was_measured_on_a_related_card_or_version_holds_until_this_one_is(table: Any) -> None:
    for field, value, word in (
        ("torch", "1.0", "version"), ("triton", "1.0", "version"), ("device", "NVIDIA H200", "card"),
    ):  # fmt: skip
        table({**ENTRY, field: value})
        assert ask() == "aten", field
        assert explain("linear_gelu", 1576, 3072, 384, torch.bfloat16, CARD).differs == (word,)
        table({**ENTRY, field: value}, {**ENTRY, "choice": "triton"})
        assert ask() == "triton", field
    old, new = {**ENTRY, "torch": "2.9", "choice": "triton"}, {**ENTRY, "torch": "2.10"}
    for entries in ((old, new), (new, old)):
        table(*entries)
        assert ask(device="NVIDIA H200") == "aten"
    table({**ENTRY, "device": "NVIDIA A100-SXM4-80GB"})
    assert ask() == "triton"


def test_one_half_type_speaks_for_the_other_until_that_one_is_measured(table: Any) -> None:
    table(ENTRY)
    assert ask(dtype=torch.float16) == "aten"
    assert explain("linear_gelu", 1576, 3072, 384, torch.float16, CARD).differs == ("type",)
    table(ENTRY, {**ENTRY, "dtype": "float16", "choice": "triton"})
    assert (ask(dtype=torch.float16), ask()) == ("triton", "aten")
    table(ENTRY, {**ENTRY, "dtype": "float16", "choice": "triton", "rows": 900})  # nearer than the other type's factor
    assert ask(dtype=torch.float16) == "triton"
    table({**ENTRY, "dtype": "float32"})
    assert ask() == "triton"


def test_the_nearest_number_of_rows_decides_up_to_a_factor_of_four(table: Any) -> None:
    table({**ENTRY, "rows": 100}, {**ENTRY, "rows": 400, "choice": "triton"}, {**ENTRY, "rows": 4000})
    assert [ask(rows) for rows in (25, 100, 199, 201, 800, 2000, 16000)] == [
        "aten", "aten", "aten", "triton", "triton", "aten", "aten",
    ]  # fmt: skip
    table({**ENTRY, "rows": 100})
    assert [ask(rows) for rows in (0, 24, 25, 400, 401)] == ["triton", "triton", "aten", "aten", "triton"]


def test_the_nearest_shape_is_that_of_equal_output_and_length(table: Any) -> None:
    table({**ENTRY, "rows": 788}, {**ENTRY, "rows": 197, "choice": "triton"})
    found = explain(
        "linear_gelu", 1576, 1536, 384, torch.bfloat16, CARD
    )  # S/16 at batch 8: half as wide, twice as long
    assert (found.choice, found.entry["rows"], found.differs, found.work) == ("aten", 788, ("shape",), 1.0)
    assert ask(788, 3072, 96) == ask(788, 3072, 1536) == "aten"
    assert ask(788, 3072, 95) == ask(788, 3072, 1537) == "triton"  # the default: too short and too long
    table({**ENTRY, "n": 1536, "rows": 1576}, {**ENTRY, "rows": 788, "choice": "triton"})
    assert (ask(1576, 1536), ask(788, 3072)) == ("aten", "triton")  # equally near: the very shape


def test_attention_goes_by_heads_of_all_images_and_by_tokens(table: Any) -> None:
    table(ATTENTION)
    for batch, tokens, heads in ((8, 197, 6), (2, 197, 24), (16, 257, 3), (3, 201, 16), (1, 50, 12), (4, 577, 12)):
        assert ask(batch, tokens, heads, op="packed_attention") == "triton", (batch, tokens, heads)
    for batch, tokens, heads in ((1, 197, 11), (33, 197, 6), (4, 49, 12), (4, 789, 12)):
        assert ask(batch, tokens, heads, op="packed_attention") == "sdpa", (batch, tokens, heads)
    table(ATTENTION, {**ATTENTION, "n": 577, "choice": "sdpa"})
    assert ask(8, 257, 6, op="packed_attention") == "triton" and ask(8, 400, 6, op="packed_attention") == "sdpa"


MODELS = {
    "T/16": (192, 3, 197), "S/16": (384, 6, 197), "S/14": (384, 6, 257), "B/16": (768, 12, 197),
    "B/14 reg4": (768, 12, 261), "L/16": (1024, 16, 197), "L/14": (1024, 16, 257),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("card", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
@pytest.mark.parametrize("name", MODELS)
def test_usual_models_find_a_measurement_at_batch_1_and_8(name: str, card: str, dtype: torch.dtype) -> None:
    c, heads, tokens = MODELS[name]
    for batch in (1, 8):
        for shape in (
            ("linear_gelu", batch * tokens, 4 * c, c),
            ("splitk_linear", batch * tokens, c, 4 * c),
            ("splitk_linear", batch * tokens, c, c),
            ("packed_attention", batch, tokens, heads),
        ):
            found = explain(*shape, dtype, card)
            assert found.table == "package" and found.choice == choose(*shape, dtype, card), shape
    measured = {e["choice"] for e in read(PACKAGES) if e["op"] == "packed_attention" and e["rows"] * e["k"] <= 24}
    assert {choose("packed_attention", 1, tokens, heads, dtype, card)} == measured == {"triton"}


def test_the_choice_for_all_numbers_of_rows_is_that_of_the_nearest_entry(table: Any) -> None:
    """`choose` compares the rows with a few limits, `explain` measures every distance."""
    rng = random.Random(0)
    for _ in range(8):
        entries = {}
        for _ in range(rng.randint(1, 8)):
            entry = {
                **ENTRY, "rows": rng.randint(1, 300), "n": rng.choice((96, 192)), "k": rng.choice((64, 128, 200)),
                "dtype": rng.choice(("bfloat16", "float16")), "torch": rng.choice((ENTRY["torch"], "1.0")),
                "choice": rng.choice(("triton", "aten")),
            }  # fmt: skip
            entries[tuple(entry[field] for field in choices.FIELDS)] = entry
        table(*entries.values())
        for n, k in ((96, 64), (192, 200), (150, 100)):
            for rows in range(1300):
                found = explain("linear_gelu", rows, n, k, torch.bfloat16, CARD)
                assert choose("linear_gelu", rows, n, k, torch.bfloat16, CARD) == found.choice, (rows, n, k, entries)


def test_the_nearest_entry_is_that_of_the_documented_distance(table: Any) -> None:
    """Against the formula written once more: factors of rows · n and of k, each at most 4, 2 for every difference."""
    rng = random.Random(1)
    shapes = {(rng.randint(20, 900), rng.choice((96, 192, 384)), rng.choice((64, 128, 200))) for _ in range(12)}
    entries = [
        {**ENTRY, "rows": r, "n": n, "k": k, "dtype": rng.choice(("bfloat16", "float16")), "choice": "aten"}
        for r, n, k in sorted(shapes)
    ]
    table(*entries)
    for _ in range(300):
        r, n, k = rng.randint(5, 4000), rng.randint(50, 800), rng.randint(16, 800)

        def away(entry: dict[str, Any], r: int = r, n: int = n, k: int = k) -> float:
            first = abs(math.log2(r * n / entry["rows"] / entry["n"]))
            second = abs(math.log2(k / entry["k"]))
            return first + second + (entry["dtype"] != "bfloat16") if max(first, second) <= 2 else math.inf

        nearest = min(map(away, entries))
        found = explain("linear_gelu", r, n, k, torch.bfloat16, CARD)
        if nearest == math.inf:
            assert found.entry is None
        else:
            assert found.entry is not None and away(found.entry) == pytest.approx(nearest)


def test_tables_lie_over_one_another(table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {**ENTRY, "choice": "triton"}
    table(ENTRY, {**ENTRY, "rows": 197})
    assert [layer.name for layer in layers()] == ["package"]
    use([here])
    assert [layer.name for layer in layers()] == ["tuned", "package"]
    assert (ask(), ask(1000), ask(197)) == ("triton", "triton", "aten")
    assert explain("linear_gelu", 1576, 3072, 384, torch.bfloat16, CARD).table == "tuned"
    path = tmp_path / "mine.json"
    path.write_text(text([{**here, "choice": "aten"}]))
    monkeypatch.setenv("VTK_CHOICES", str(path))
    use([here])
    assert ask() == "aten"
    assert str(explain("linear_gelu", 1576, 3072, 384, torch.bfloat16, CARD)).endswith(f"(VTK_CHOICES ({path}))")
    monkeypatch.delenv("VTK_CHOICES")
    use(path)
    assert (layers()[0].name, ask(), len(layers())) == ("tuned", "aten", 2)
    use(None)
    assert [layer.name for layer in layers()] == ["package"]


def test_a_tuned_table_that_cannot_be_used_leaves_the_one_before(table: Any, tmp_path: Path) -> None:
    table()
    use([ENTRY])
    for bad in ([{**ENTRY, "choice": "magic"}], [ENTRY, ENTRY], tmp_path / "none.json", [3]):
        with pytest.raises(ChoiceTableError) as caught:
            use(bad)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    assert ask() == "aten"


@pytest.mark.parametrize("content", [None, "", "[]", "\x00", '{"schema": 1, "measured": [{"op": "x", "choice": "y"}]}'])
def test_a_bad_file_in_the_environment_is_one_line_at_every_choice(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("VTK_CHOICES", str(path))
    use(None)
    for _ in range(2):
        with pytest.raises(ChoiceTableError) as caught:
            ask()
        line = str(caught.value)
        assert line.startswith(f"VTK_CHOICES: {path} ") and "\n" not in line
        assert line.endswith("; give the path of a choice table, or unset it")
    assert ask(device=None) == "triton"  # no card, no table


def _table_text(**changes: Any) -> str:
    return json.dumps({"schema": 1, "measured": [{**ENTRY, **changes}]})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (_table_text(choice="x" * 10**6), "must be one of|`choice`"), (_table_text(op="x" * 10**6), "`op`"),
        (_table_text(op="linear_gulp"), r"`op` \('linear_gulp'\) must be one of"),
        (_table_text(op=["linear_gelu"]), "unhashable"), (json.dumps({"schema": "2" * 10**6}), "schema 22"),
        (_table_text().replace('"choice"', '"choice": "triton", "choice"'), "'choice' twice"),
        ('{"schema": 1, "measured": [], "measured": []}', "'measured' twice"),
        (_table_text().replace('"schema": 1', '"schema": true'), "schema True"),
    ],
    ids=["long choice", "long op", "op", "list", "long schema", "key twice", "entries twice", "schema"],
)  # fmt: skip
def test_a_bad_file_is_named_in_a_short_line(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ChoiceTableError, match=says) as caught:
        choices.read(path)
    assert len(str(caught.value)) < len(str(path)) + 400 and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["x" * 5000, "one\ntwo", "\x1b[2J", "\udcff"])
def test_a_path_that_no_file_can_have_is_a_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VTK_CHOICES", name)
    use(None)
    with pytest.raises(ChoiceTableError, match=r"cannot be read: .*; give the path of a choice table") as caught:
        ask()
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1200


def test_a_bad_file_in_the_environment_does_not_show_at_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VTK_CHOICES", str(tmp_path / "none.json"))
    spec = importlib.util.spec_from_file_location("imported_anew", choices.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert module.choose("linear_gelu", 1, 1, 1, torch.bfloat16, None) == "triton"
    with pytest.raises(ChoiceTableError, match=r"none\.json cannot be read: No such file or directory; give"):
        module.layers()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (("linear_gelu", 1576, 3072, 384, torch.bfloat16, CARD), "aten: measured: 1576 × 3072 × 384, bfloat16, "),
        (
            ("linear_gelu", 788, 3072, 384, torch.float16, CARD),
            "aten: nearest shape (work differs by 2×), other type: ",
        ),
        (("linear_gelu", 1576, 3072, 384, torch.bfloat16, "NVIDIA H200"), "aten: other card: 1576 × 3072 × 384, "),
        (("linear_gelu", 1, 3072, 384, torch.bfloat16, CARD), "triton: the default, nothing near was measured"),
    ],
)
def test_an_answer_says_where_it_comes_from(answer: tuple[Any, ...], said: str, table: Any) -> None:
    table(ENTRY)
    assert str(explain(*answer)).startswith(said)


def test_compiled_code_takes_the_choice_of_its_rows(table: Any) -> None:
    table(ENTRY, {**ENTRY, "rows": 197, "choice": "triton"})

    def step(x: torch.Tensor) -> torch.Tensor:
        answer = choose("linear_gelu", x.shape[0] * x.shape[1], 3072, 384, torch.float16, CARD)
        return x + 1 if answer == "aten" else x * 2

    for dynamic in (None, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(step, fullgraph=True, backend="eager", dynamic=dynamic)
        for batch in (1, 2, 5, 8, 34, 144):
            x = torch.ones(batch, 197, 1)
            assert torch.equal(compiled(x), step(x)), (dynamic, batch)
        # one more than the two limits in 197 … 28368 rows; another is torch's, for batch 1 or the first, static size
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


def test_an_operation_without_a_choice_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"`op` \('norm'\) has no choice; these have: grouped_linear, grouped_low_rank"
    ):
        choose("norm", 1, 1, 1, torch.bfloat16, None)


@pytest.mark.parametrize(
    "content,said",
    [
        ("[]", "no choice table: TypeError"),
        ("{", "no choice table: JSONDecodeError"),
        ('{"schema": 2, "measured": []}', "schema 2, this version reads 1"),
        (json.dumps({"schema": 1, "measured": [{**ENTRY, "choice": "magic"}]}), r"`choice` \('magic'\) must be one of"),
        (json.dumps({"schema": 1, "measured": [{**ENTRY, "op": "norm"}]}), r"`op` \('norm'\) must be one of"),
        (json.dumps({"schema": 1, "measured": [{"op": "linear_gelu", "choice": "aten"}]}), "KeyError: 'rows'"),
        (json.dumps({"schema": 1, "measured": [{**ENTRY, "rows": 0}]}), "must be whole numbers from 1 to"),
        (json.dumps({"schema": 1, "measured": [{**ENTRY, "n": 10**400}]}), "must be whole numbers from 1 to"),
        (json.dumps({"schema": 1, "measured": [{**ENTRY, "n": True}]}), "must be whole numbers from 1 to"),
        (json.dumps({"schema": 1, "measured": [{**ENTRY, "k": "384"}]}), "must be whole numbers from 1 to"),
        (json.dumps({"schema": 1, "measured": [{**ENTRY, "torch": "new"}]}), "invalid literal"),
        (json.dumps({"schema": 1, "measured": [{**ENTRY, "device": None}]}), "must be text"),
        (json.dumps({"schema": 1, "measured": 3}), "TypeError"),
        (json.dumps({"schema": 1, "measured": [ENTRY, {**ENTRY, "choice": "triton"}]}), "two entries with the same"),
    ],
)
def test_a_table_that_cannot_be_used_says_why(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "choices.json"
    path.write_text(content)
    with pytest.raises(ChoiceTableError, match=said) as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_not_opened(kind: str, tmp_path: Path) -> None:
    path = tmp_path / kind
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(ChoiceTableError, match="is no file"):
        read(path)


def test_no_card_is_asked_for_its_name_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: pytest.fail("asked"))
    assert device_name(torch.ones(1)) is None
    assert choose("packed_attention", 8, 197, 12, torch.bfloat16, None) == "sdpa"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with FakeTensorMode():
        assert device_name(torch.empty(1, device="cuda")) is None


def test_a_fake_tensor_is_on_the_card_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    with FakeTensorMode():
        assert device_name(torch.empty(1, device="cuda:1")) == "card 1"
