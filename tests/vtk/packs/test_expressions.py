"""Adapters whose config would keep PEFT busy for ever, or take all memory, are refused before PEFT reads it."""

import time
from pathlib import Path
from typing import Any

import pytest

from vtk.errors import DataError
from vtk.packs import expressions
from vtk.packs.expressions import check_config

NAMES = [f"blocks.{i}.{part}" for i in range(12) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "norm1")]
EVIL = r"(([a-z0-9.])+)+!"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "_SECONDS", 0.15)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": EVIL}, {"exclude_modules": EVIL}, {"target_modules": ["qkv"], "rank_pattern": {EVIL: 4}},
        {"layers_pattern": ["(b+)+(l+)+([^x]+)+!"]}, {"modules_to_save": ["(.*a?)*!"]}, {"feedforward_modules": EVIL},
    ],
)  # fmt: skip
def test_an_expression_that_takes_for_ever_is_stopped(config: dict[str, Any]) -> None:
    start = time.monotonic()
    with pytest.raises(DataError, match="regular expression that does not finish"):
        check_config(config, Path("a.json"), NAMES)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": r"blocks\.\d+\.attn\.(qkv|proj)"}, {"target_modules": ["qkv", "proj"]},
        {"rank_pattern": {r"blocks\.0\.attn\.qkv": 2, "^.*fc1": 4}, "alpha_pattern": {"x+": 3}},
        {"target_modules": "all-linear"}, {"target_modules": "(unclosed*"}, {"target_modules": None, "r": 8},
        {"projection_prng_key": 10**9, "random_loc_seed": 10**12},
    ],
)  # fmt: skip
def test_expressions_of_every_day_pass(config: dict[str, Any]) -> None:
    check_config(config, Path("a.json"), NAMES)


@pytest.mark.parametrize("number", [1 << 20, -(1 << 20), 10**400, float("inf")])
def test_numbers_beyond_any_rank_are_refused(number: float) -> None:
    for config in ({"r": number}, {"rank_pattern": {"qkv": number}}, {"layers_to_transform": [0, number]}):
        with pytest.raises(DataError, match=r"at most 65,536 is allowed"):
            check_config(config, Path("a.json"), NAMES)
