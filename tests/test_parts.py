"""`--part K/N`: every test is in exactly one part, and parts take about the same time."""

import random
from functools import partial
from itertools import chain
from pathlib import Path

import pytest

from tests._parts import SECONDS, SHORT, deal, parse

pytest_plugins = ["pytester"]
REPO = Path(__file__).parents[1]


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_parts_are_whole_equal_and_the_same_in_any_order(parts):
    files = [*SECONDS, *(f"tests/test_{i}.py" for i in range(40))]
    found = deal(files, parts)
    assert set(found) == set(files) and set(found.values()) == set(range(1, parts + 1))
    loads = [sum(SECONDS.get(f, SHORT) for f in files if found[f] == part) for part in range(1, parts + 1)]
    assert max(loads) - min(loads) <= max(SHORT, *(SECONDS.get(f, SHORT) for f in files))
    assert deal(random.Random(0).sample(files, len(files)), parts) == found


def test_files_of_the_record_are_here():
    assert [file for file in SECONDS if not (REPO / file).exists()] == []


@pytest.mark.parametrize("text", ["0/3", "4/3", "2", "1/0", "-1/3", "a/b"])
def test_what_is_no_part_is_refused(text):
    with pytest.raises(pytest.UsageError, match="give K/N with K from 1 to N"):
        parse(text)


def test_every_test_that_m_leaves_runs_in_exactly_one_part(pytester):
    pytester.makeini("[pytest]\nmarkers = slow: long")
    slow = "@pytest.mark.slow\n@pytest.mark.parametrize('i', [1, 2])\ndef test_slow(i): pass"
    code = f"import pytest\n{slow}\ndef test_quick(): pass"
    pytester.makepyfile(**{f"test_{name}": code for name in "abcde"})
    run = partial(pytester.inline_run, "-p", "tests._parts", "-m", "slow")

    def ran(*flags):
        reports = run(*flags).getreports("pytest_runtest_logreport")
        return [report.nodeid for report in reports if report.when == "call"]

    whole, parts = ran(), [ran("--part", f"{k}/3") for k in (1, 2, 3)]
    assert sorted(chain(*parts)) == sorted(whole) and len(whole) == 10
    assert sorted(map(len, parts)) == [2, 4, 4]  # a file's tests stay together
    assert run("--part", "7/7").ret == pytest.ExitCode.OK  # five files: nothing is left for it
    assert run("--part", "4/3").ret == pytest.ExitCode.USAGE_ERROR
