"""Counts the most bytes of a graph's values that are alive at once."""

from collections import Counter
from collections.abc import Iterable, Sequence


def peak_of(
    steps: Sequence[tuple[Iterable[str], Iterable[str]]],
    sizes: dict[str, int],
    owner: dict[str, str],
    uses: Counter[str],
) -> int:
    """Run through a graph: a value is there from the step that makes it to the last one that reads it.

    Args:
        steps: names that each operator reads and makes, in order.
        sizes: bytes by name of a value that owns its memory.
        owner: name of a value to that of the one whose memory it is.
        uses: how often each of these is read, and once more if it is an output; used up.
    """
    alive, now, peak = set[str](), 0, 0
    for inputs, outputs in steps:
        produced = {owner[name] for name in outputs if name in owner} - alive
        alive |= produced
        now += sum(sizes[name] for name in produced)
        peak = max(peak, now)
        for name in inputs:
            if name in owner:
                uses[owner[name]] -= 1
        for name in {owner[n] for n in (*inputs, *outputs) if n in owner}:
            if name in alive and uses[name] == 0:
                alive.discard(name)
                now -= sizes[name]
    return peak
