"""Checks numbers and regular expressions in an adapter's config before PEFT uses them.

PEFT matches the names of a model's modules with expressions that the file gives. One such as ``(a+)+b`` takes time
that doubles with each letter of a name, and Python cannot stop it: a process of its own can be.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vtk.errors import DataError

_SECONDS = 5.0
_LARGEST = 1 << 16
"""Above any rank: PEFT makes matrices of that many rows for each layer before it looks at what the file holds."""
_WORDS = ("modules", "pattern", "layers", "parameters", "mapping")
"""In the names of the options that PEFT takes for expressions, as values or as keys."""
_REPEATS = frozenset("*+?{")
_TRY = r"""
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    for form in ("%", "(.*\\.)?(%)$", "(^|.*\\.)%($|\\..*)", "(?:^|.*?\\.)%\\.(?P<idx>\\d+)\\.", ".*\\.%$"):
        try:
            expression = re.compile(form.replace("%", pattern))
        except (re.error, IndexError):
            continue  # PEFT says so, where it uses it
        for name in names:
            expression.fullmatch(name), expression.match(name), expression.search(name)
"""


def check_config(config: Mapping[str, Any], where: Path, names: Iterable[str]) -> None:
    """Refuse a config whose expressions do not end, or whose numbers would need too much memory.

    Args:
        config: of an adapter, as parsed.
        where: its file.
        names: of the modules and weights that the expressions are matched with.

    Raises:
        DataError: names the option.
    """
    for key, value in config.items():
        number = next((n for n in _numbers(value) if abs(n) > _LARGEST), None)
        if number is not None and not any(word in key for word in ("seed", "prng")):
            raise DataError(f"{where}: `{key[:60]}` is {str(number)[:20]}; at most {_LARGEST:,} is allowed")
    patterns = [text for key, value in config.items() if any(word in key for word in _WORDS) for text in _texts(value)]
    patterns = [text for text in dict.fromkeys(patterns) if _REPEATS.intersection(text)]
    if not patterns:
        return
    task = json.dumps([patterns, sorted({*names})])
    try:
        run = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _TRY], input=task, text=True, capture_output=True, timeout=_SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise DataError(
            f"{where} has a regular expression that does not finish on this model's names within {_SECONDS:g} s, such "
            f"as {max(patterns, key=len)[:60]!r}; list the modules by their names"
        ) from error
    if run.returncode:
        raise DataError(f"{where} has a regular expression that cannot be used, such as {patterns[0][:60]!r}")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for each in value:
            yield from _texts(each)
        if isinstance(value, dict):
            yield from _texts(list(value.values()))


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)
