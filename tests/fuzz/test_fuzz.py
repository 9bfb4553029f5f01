"""2,000 damaged files, shared out among all readers: each is read, or refused in one line (python -m tests.fuzz)."""

import pytest

from tests.fuzz.__main__ import fuzz
from tests.fuzz.readers import READERS

FILES = 2_000


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(READERS))
def test_a_damaged_file_is_read_or_refused_in_one_line_and_soon(name: str) -> None:
    share = READERS[name].share / sum(reader.share for reader in READERS.values())
    assert fuzz(name, 0, max(1, round(FILES * share))) == []
