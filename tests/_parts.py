"""``--part K/N``: deal the test files into parts that take about the same time, and run one of them."""

from collections.abc import Iterable, Mapping

import pytest

SECONDS: Mapping[str, float] = {}
"""Of the files with the longest slow tests, what these took; every other file counts as `SHORT`."""

SHORT = 4.0


def parse(text: str) -> tuple[int, int]:
    """Read ``K/N``: part K, counted from 1, of N.

    Raises:
        UsageError: the text says no such thing.
    """
    k, slash, n = text.partition("/")
    if not (slash and k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise pytest.UsageError(f"`--part` {text} is not allowed; give K/N with K from 1 to N, such as 2/3")
    return int(k), int(n)


def deal(files: Iterable[str], parts: int, seconds: Mapping[str, float] = SECONDS) -> dict[str, int]:
    """Return the part of each file, 1 to ``parts``: the longest file first, each to the part that has least so far."""
    load = [0.0] * parts
    found = {}
    for file in sorted(set(files), key=lambda file: (-seconds.get(file, SHORT), file)):
        part = load.index(min(load))
        load[part] += seconds.get(file, SHORT)
        found[file] = part + 1
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="run the K-th of N parts of the test files that -m leaves")


@pytest.hookimpl(trylast=True)  # after -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.part is None:
        return
    part, parts = parse(config.option.part)
    files = [item.nodeid.partition("::")[0] for item in items]
    dealt = deal(files, parts)
    others = [item for item, file in zip(items, files, strict=True) if dealt[file] != part]
    items[:] = [item for item, file in zip(items, files, strict=True) if dealt[file] == part]
    config.hook.pytest_deselected(items=others)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    # a part may have none of the few tests of a kind
    if session.config.option.part is not None and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
