"""Calls run while other threads add, remove and reload: right, or the clear error."""

import threading
from typing import Any

import pytest
import torch

from vtk.errors import UsageError


@pytest.mark.parametrize(
    "way", ["held", "stacked", "fused", "fused, stacked", "factors", "factors, stacked", "factors, merged copies"]
)
def test_calls_beside_changes(make_lab: Any, way: str) -> None:
    lab = make_lab(depth=1)
    names = ("a", "b", "c")
    # "a" and "b" swap packs under one name as they come back, so that a mix-up would show
    packs = {name: lab.pack(name, seed=i) for i, name in enumerate(names)}
    if "factors" in way:  # beside a whole pack
        packs |= {name: lab.factors(name, ranks=(1 + i, 2), seed=i) for i, name in enumerate("ab")}
    images = {name: torch.randn(1, 3, 32, 32, dtype=torch.float64) for name in names}
    wanted = {
        (name, pack): lab.alone(packs[pack])(images[name]).detach() for name in names for pack in names
    }  # fmt: skip
    options = {"kernels": "stacked" in way, "fused": "fused" in way or "factors" in way}
    if "copies" in way:
        options["max_bytes"] = 1 << 30
    bank = lab.bank(packs, **options)
    wrong: list[str] = []
    errors = 0
    done = threading.Event()

    def call(mine: int) -> None:
        nonlocal errors
        for i in range(30):
            asked = {n: images[n] for k, n in enumerate(names) if (mine + i) % 3 != k}
            try:
                found = bank(asked)
            except UsageError as error:
                errors += 1
                if "there is no task" not in str(error):
                    wrong.append(str(error))
                continue
            for name, logits in found.items():
                if not any(torch.allclose(logits, wanted[name, p], rtol=1e-12, atol=1e-12) for p in names):
                    wrong.append(name)

    def change() -> None:
        try:
            turn = 0
            while not done.is_set():
                bank.remove("a")
                bank.add("a", packs["b" if turn % 2 else "a"])
                bank.reload("b")
                bank.memory()
                turn += 1
        except Exception as error:
            wrong.append(repr(error))

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    changer = threading.Thread(target=change)
    for thread in (*callers, changer):
        thread.start()
    for thread in callers:
        thread.join()
    done.set()
    changer.join()
    assert not wrong
    assert errors < 120
    assert set(bank.tasks) == set(names)
