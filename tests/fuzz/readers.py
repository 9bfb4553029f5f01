"""Every reader of others' files, by name; the shares add up to 21,300.

A reader either raises a `VtkError` or returns what its docstring promises, which is asserted: shapes, and numbers that
are finite where that is promised.
"""

from collections.abc import Mapping

from tests.fuzz import answers, exports, images, packs, texts, weights
from tests.fuzz.reader import Reader

READERS: Mapping[str, Reader] = {
    **weights.READERS,
    **packs.READERS,
    **exports.READERS,
    **texts.READERS,
    **images.READERS,
    **answers.READERS,
}
