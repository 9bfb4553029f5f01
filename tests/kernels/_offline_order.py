"""Order of a compiled kernel's accesses to memory: fetches before the wait of a chain, barriers around a count.

PTX keeps the order of what has effects, so its text is enough: no card is needed.
"""

import re
from collections.abc import Iterator
from typing import Any

_TOUCH = re.compile(
    r"(?P<wait>griddepcontrol\.wait)"
    r"|(?P<launch>griddepcontrol\.launch_dependents)"
    r"|(?P<fetch>(?:cp\.async\.bulk\.)?prefetch\.(?:global\.)?L2\S*)"
    r"|(?P<barrier>bar\.sync|barrier\.sync)"
    r"|(?P<count>\b(?:atom|red)\.global\S*)"
    r"|(?P<store>st\.(?:global|weak|release|volatile)\S*|cp\.async\.bulk\.tensor\S*\.global\.shared\S*)"
    r"|(?P<load>ld\.(?:global|weak|acquire|volatile)\S*|cp\.async\.bulk\.tensor\S*\.shared\S*|cp\.async\.c[ag]\S*)"
    r"|(?P<multiply>wgmma\.mma_async\S*|mma\.sync\S*)"
)
_MEMORY = ("load", "store", "count")


def touches(ptx: str) -> list[tuple[str, str]]:
    """Return (kind, instruction) of all in a kernel that touches global memory, waits or multiplies, in order."""
    return [(str(m.lastgroup), m.group(0)) for m in _TOUCH.finditer(ptx)]


def order_faults(ptx: str, arguments: dict[str, Any], chained: bool) -> Iterator[str]:
    """Say what is wrong with the order of a kernel's instructions.

    Args:
        ptx: its text.
        arguments: of the launch: a kernel with `ahead_ptr` fetches a weight, one with `counters_ptr` and `partials_ptr`
            counts what its programs wrote.
        chained: launched so that it overlaps with the kernel before.
    """
    found = touches(ptx)
    kinds = [kind for kind, _ in found]
    there = {name for name, value in arguments.items() if value is not None}
    constants = len(there & {"ahead_ptr", "b_ptr"}) if "ahead_ptr" in there else 0
    constants += {"partials_ptr", "bias_ptr"} <= there  # of add_norm
    if not chained:
        if "ahead_ptr" in there or {"wait", "launch", "fetch"} & set(kinds):
            yield "not chained, and yet it waits or fetches"
    elif kinds.count("wait") != 1:
        yield f"{kinds.count('wait')} waits for the kernel before"
    else:
        before, after = found[: kinds.index("wait")], found[kinds.index("wait") + 1 :]
        for kind, instruction in before:
            if kind in (*_MEMORY, "launch"):
                yield f"{instruction} before the wait"
        fetches = sum(kind == "fetch" for kind, _ in before)
        if fetches != constants:
            yield f"{fetches} fetches before the wait, of {constants} constants"
        if any(kind == "fetch" for kind, _ in after):
            yield "a fetch after the wait"
    counting = {"partials_ptr", "counters_ptr"} <= there
    if arguments.get("START") or counting:
        if "multiply" in kinds and "load" not in kinds[: kinds.index("multiply")]:
            yield "what the sums start from is read after the product"
    if counting:
        yield from _count_faults(found)


def _count_faults(found: list[tuple[str, str]]) -> Iterator[str]:
    kinds = [kind for kind, _ in found]
    if kinds.count("count") != 1:
        yield f"{kinds.count('count')} counts"
        return
    at = kinds.index("count")
    if "acq_rel" not in found[at][1] or ".gpu." not in found[at][1]:
        yield f"{found[at][1]}: what other programs wrote need not be seen behind it"
    before, after = kinds[:at], kinds[at + 1 :]
    if "store" not in before or "barrier" not in before[len(before) - before[::-1].index("store") :]:
        yield "no barrier between the sums' stores and the count"
    behind = [i for i, kind in enumerate(after) if kind in ("load", "store")]
    if not behind or "barrier" not in after[: behind[0]]:
        yield "no barrier between the count and what it allows"
    for kind, instruction in found[at + 1 :]:
        if kind == "load" and ".cg" not in instruction and "cp.async" not in instruction:
            yield f"{instruction} behind the count may come from a multiprocessor's own cache"
