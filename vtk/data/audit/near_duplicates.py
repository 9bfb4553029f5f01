"""Near duplicates: pairs of fingerprints that differ in few bits, without comparing all pairs."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

NEAR = 12
"""Most bits of 128 in which near duplicates differ.

Of the 8 million pairs of 4,000 photographs (32 px, CIFAR-10) the five that differ in up to 18 bits show the same
photograph twice; the first pair that does not differs in 19. Of their JPEG copies of quality 60, 98 in 100 differ in up
to 12 bits, of copies of double size 97, of 1.25 times the size 87.
"""

_CHANCE = 0.05

MOST = 1_000_000
"""Most pairs that are compared; sets of similar images, such as video frames, can have more."""

_ORDER = np.random.default_rng(0).permutation(128)
"""A permutation of the bits: neighbouring bits are correlated, so that words of them would take few values."""

_BITS = np.array([bin(i).count("1") for i in range(1 << 16)], dtype=np.uint8)


def near_limit(prints: Sequence[str]) -> int:
    """Return the most bits in which near duplicates of a set differ: `NEAR`, or fewer if all its images are similar.

    Digits, scans of one form or frames of one scene have distances as small as those of copies. The limit is where
    `_CHANCE` pairs of different images are expected by a normal distribution with the median and the upper half of
    the distances (copies are in the lower half). If it is negative, near duplicates cannot be found.
    """
    count = len(prints)
    if count < 3:
        return NEAR
    words = _words(prints)
    if count <= 150:
        a, b = np.triu_indices(count, 1)
    else:
        a, b = np.random.default_rng(0).integers(0, count, (2, 10_000))
        a, b = a[a != b], b[a != b]
    apart = _BITS[words[a] ^ words[b]].sum(axis=1, dtype=np.int64)
    apart.sort()  # np.percentile and np.unique would import masked arrays: longer than all of this
    middle, upper = (int(apart[int(share * (len(apart) - 1))]) for share in (0.5, 0.8413))
    pairs = count * (count - 1) / 2
    return min(NEAR, math.floor(middle + NormalDist().inv_cdf(_CHANCE / (pairs + 1)) * (upper - middle)))


def _words(prints: Sequence[str]) -> np.ndarray:
    """Return fingerprints as (count, 8) uint16, bits permuted."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex("".join(prints)), np.uint8).reshape(-1, 16), axis=1)
    return np.ascontiguousarray(np.packbits(bits[:, _ORDER], axis=1)).view(np.uint16)


def near_pairs(prints: Sequence[str], limit: int = NEAR, most: int = MOST) -> list[tuple[int, int]]:
    """Return the pairs (i, j), i < j, of fingerprints that differ in at most ``limit`` bits, most similar first.

    Only pairs with an equal word, of eight words of 16 bits, are compared: these include all pairs that differ in up
    to seven bits, and 96 in 100 of the real copies that differ in eight to twelve. If there are more than ``most``
    such pairs, some are not compared.

    Args:
        prints: 32 hexadecimal digits each.
        limit: bits; negative: no pairs.
        most: pairs to compare, at most.
    """
    if len(prints) < 2 or limit < 0:
        return []
    words = _words(prints)
    found: list[np.ndarray] = []
    for band in range(8):
        order = np.argsort(words[:, band], kind="stable")
        keys = words[order, band]
        step = 1
        same = np.flatnonzero(keys[1:] == keys[:-1])  # positions that have an equal key `step` places further
        while len(same) and most > 0:
            same = same[:most]
            most -= len(same)
            a, b = order[same], order[same + step]
            apart = _BITS[words[a] ^ words[b]].sum(axis=1, dtype=np.int64)
            close = apart <= limit
            low, high = np.minimum(a[close], b[close]), np.maximum(a[close], b[close])
            found.append(np.stack([apart[close], low, high]))
            step += 1
            same = same[same + step < len(keys)]
            same = same[keys[same + step] == keys[same]]
    if not found:
        return []
    apart, low, high = np.concatenate(found, axis=1)
    keys = np.sort((apart * len(prints) + low) * len(prints) + high)
    keys = keys[np.diff(keys, prepend=-1) > 0]  # a pair may agree in several words
    return list(zip((keys // len(prints) % len(prints)).tolist(), (keys % len(prints)).tolist(), strict=True))
