"""Faults that `_offline` reports, and occupancy of a multiprocessor; nothing is compiled here."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels._offline_cases import TORCHS, cases
from tests.kernels._offline_occupancy import resident, wanted
from tests.kernels._offline_rules import compare
from vtk_kernels import _resident, choices
from vtk_kernels._resident import RESIDENT, Resident, registers
from vtk_kernels.choices import ALLOWED

ROW = {"kernel": "kernel", "stack": 0, "local": 0, "shared": 0, "blocks": {}, "warps": 4, "programs": 1}


@pytest.mark.parametrize(
    "change,said",
    [
        ({"stack": 8}, "spills: STACK 8"),
        ({"local": 4}, "LOCAL 4 bytes"),
        ({"shared": 164 * 1024}, "shared memory 167936 bytes, the card has 166912"),
        ({"registers": 112}, "registers 100 → 112"),
        ({"tensor_cores": 0}, "no wgmma.mma_async in a product"),
        (
            {"warps": 16},
            "1 programs fit on a multiprocessor, its launcher counts on 2: 100 registers, 16 warps, 0 bytes",
        ),
        ({"kernel": "new"}, "`vtk_kernels._resident.RESIDENT` says nothing of new"),
        ({"registers": 110}, None),
        ({"kernel": "another"}, "kernel: in the baseline, but no longer compiled"),
        ({"warps": 16, "programs": 132}, None),
    ],
)
def test_faults_are_found(change: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RESIDENT, "kernel", Resident(2, 2))
    monkeypatch.setitem(RESIDENT, "another", Resident(2, 2))
    row = {**ROW, "registers": 100, "tensor_cores": 4, "programs": 1000}
    label = "x sm_80" if "shared" in change else "x sm_90"
    found = {"triton": "9", "never launched": [], "rows": {label: {**row, **change}}}
    baseline = {"triton": "9", "rows": {label: {"kernel": "kernel", "registers": 100}}}
    lines = compare(found, baseline, whole=True)
    if change.get("kernel") == "new":
        lines.remove("kernel: in the baseline, but no longer compiled")
    assert lines == [] if said is None else len(lines) == 1 and said in lines[0]
    older = [line for line in compare(found, {**baseline, "triton": "8"}, whole=True) if line in lines]
    assert older == ([] if "registers" in change else lines)  # another compiler may need other registers, never a spill


def test_what_is_missing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RESIDENT, "kernel", Resident(1, 1))
    row = {**ROW, "registers": 1, "tensor_cores": None}
    found = {"triton": "9", "never launched": ["forgotten"], "rows": {"x sm_80": row, "new sm_80": row}}
    baseline = {"triton": "9", "rows": {"x sm_80": row, "gone sm_80": row}}
    assert compare(found, baseline, whole=True) == [
        "no case launches forgotten",
        "new sm_80: not in the baseline; run _offline.py --write",
        "gone sm_80: in the baseline, but no longer compiled",
    ]
    assert compare({**found, "rows": {"x sm_80": row}}, baseline, whole=False) == ["no case launches forgotten"]
    other = {"triton": "9", "never launched": [], "rows": {"x sm_100": row}}  # a capability without a baseline
    assert compare(other, baseline, whole=False) == []


@pytest.mark.parametrize(
    ("of_thread", "shared", "warps", "capability", "programs"),
    [
        (32, 0, 4, 90, 16), (32, 0, 2, 90, 32), (64, 0, 8, 90, 4), (65, 0, 8, 90, 3), (128, 0, 8, 90, 2),
        (129, 0, 8, 90, 1), (169, 114712, 8, 90, 1), (128, 114712, 8, 90, 2), (127, 122904, 8, 90, 1),
        (128, 115712, 8, 90, 2), (128, 115713, 8, 90, 1), (155, 98328, 8, 90, 1), (255, 0, 4, 90, 2),
        (40, 82944, 4, 80, 2), (40, 82945, 4, 80, 1), (128, 98304, 8, 80, 1), (128, 98304, 8, 100, 2),
        (32, 0, 4, 89, 12), (64, 40960, 4, 120, 2), (64, 99 * 1024, 4, 86, 1), (64, 99 * 1024 + 1, 4, 86, 0),
    ],
)  # fmt: skip
def test_programs_of_a_multiprocessor_are_those_of_the_occupancy_calculator(
    of_thread: int, shared: int, warps: int, capability: int, programs: int
) -> None:
    """64 warps, 65,536 registers in quarters and by 256 a warp, 228 (164) KiB of which each program takes one more."""
    assert resident(of_thread, shared, warps, capability) == programs


def test_a_launch_needs_no_more_programs_than_it_has() -> None:
    counted_on = Resident(1, 3)
    assert [wanted(counted_on, n, 90) for n in (1, 132, 133, 264, 265, 9999)] == [1, 1, 2, 2, 3, 3]
    assert [wanted(Resident(1, 3, 2), 9999, card) for card in (90, 100)] == [3, 2]
    assert wanted(counted_on, 9999, 100) == 3
    for small in (80, 86, 89, 120):
        assert [wanted(counted_on, n, small) for n in (1, 108, 109, 9999)] == [1, 1, 1, 1]


def test_kernels_that_a_card_does_not_start_are_missed_on_others_only() -> None:
    row = {"kernel": "_norm_kernel", "registers": 100, "stack": 0, "local": 0, "shared": 0, "blocks": {}, "warps": 4}
    baseline = {"triton": "9", "rows": {"x sm_90": {"kernel": "_residual_kernel", "registers": 100}}}
    for card, missed in ((100, False), (90, True)):
        rows = {f"y sm_{card}": {**row, "programs": 1, "tensor_cores": None}}
        lines = compare({"triton": "8", "never launched": [], "rows": rows}, baseline, whole=False)
        assert ("_residual_kernel: in the baseline, but no longer compiled" in lines) is missed, lines


def test_the_bound_on_registers_lets_as_many_programs_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_resident, "capability", lambda _: 9)
    for kernel, counted_on in RESIDENT.items():
        for warps in (1, 2, 4, 8, 16):
            bound = registers(kernel, warps, torch.ones(1))
            if counted_on.hopper * warps <= 64:
                assert resident(bound or 255, 0, warps, 90) >= counted_on.hopper
            assert bound is None or bound % 8 == 0
    assert (
        registers("_linear_kernel", 8, torch.ones(1)) == 128 and registers("_linear_kernel", 4, torch.ones(1)) is None
    )
    for other in (0, 8, 10, 12):
        monkeypatch.setattr(_resident, "capability", lambda _, other=other: other)
        assert registers("_linear_kernel", 8, torch.ones(1)) is None


def test_a_grid_has_as_many_programs_as_its_card_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1)
    for generation, each in ((9, 2), (10, 1)):
        monkeypatch.setattr(_resident, "capability", lambda _, g=generation: g)
        monkeypatch.setattr(_resident, "multiprocessors", lambda _: 100)
        assert _resident.programs("_linear_kernel", x) == 100 * each
        assert _resident.programs("_norm_kernel", x) == 400


def test_every_measured_shape_is_a_case_in_both_half_types(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = choices.read(Path(choices.__file__).with_name("choices.json"))
    more = [{**entries[0], "op": op, "rows": 1576, "n": 384, "k": 384, "choice": ALLOWED[op][0]} for op in ALLOWED]
    monkeypatch.setattr(choices, "read", lambda _: entries + more)  # operations that nothing is measured of yet, too
    labels = [case.label for case in cases() if case.measured]
    assert len(set(labels)) == len(labels)
    for entry in (entry for entry in entries + more if entry["op"] not in TORCHS):
        at = "{op} {rows}×{n}×{k}".format(**entry)
        assert {f"{at} bfloat16", f"{at} float16"} <= set(labels)
