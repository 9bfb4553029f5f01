"""Prints an analysis: key numbers, readings, and last the suggested changes."""

from collections.abc import Sequence

from rich.text import Text

from vtk import console
from vtk.analysis.diagnostics import diagnostic
from vtk.analysis.report import summary
from vtk.analysis.result_files import Analysis
from vtk.text import printable

WIDTH = 80
"""Maximum line length; shorter on a narrower terminal."""

_VALUE = 11  # columns of a number: four digits with sign, exponent and two blanks


def print_analyses(analyses: Sequence[Analysis]) -> None:
    """Print one analysis, or two side by side: key numbers, diagnostics not measured, and last suggested changes.

    For one model every reading is printed; for two only the suggestions, because the report shows both beside a plot.
    """
    console.say()
    for i, one in enumerate(analyses):
        _say(f"{summary.LETTERS[i]}: {one.label}" if len(analyses) > 1 else one.label, bold=True)
    for caution in summary.cautions(analyses):
        _say(f"warning: {caution}", indent=9, style="yellow")
    if summary.diagnostics_of(analyses):
        _print_numbers(analyses)
    if len(analyses) == 1:
        for name, result in analyses[0].results.items():
            _title(name)
            _say(" ".join(diagnostic(name).read(result)), indent=2, first=2)
    _print_absent(analyses)
    console.say()
    _say("Suggested changes", bold=True)
    for i, one in enumerate(analyses):
        letter = f"{summary.LETTERS[i]}: " if len(analyses) > 1 else ""
        suggestions = summary.advice(one)
        for name, why in suggestions.items():
            _say(f"{letter}{diagnostic(name).title}: {why}", indent=4, first=2)
        if not suggestions:
            _say(f"{letter}no reading suggests a change", first=2)
    console.say()


def _print_numbers(analyses: Sequence[Analysis]) -> None:
    names = ("value",) if len(analyses) == 1 else (*summary.LETTERS, "B − A")
    room = max(_width() - _VALUE * len(names), 20)
    console.say()
    console.say(" " * room + "".join(f"{name:>{_VALUE}}" for name in names), style="dim")
    for name, numbers in summary.headline(analyses).items():
        _say(diagnostic(name).title, bold=True)
        for number, values in numbers.items():
            cells = [summary.number_text(value) for value in values]
            if len(values) > 1:
                cells.append(summary.number_text(summary.difference(values), sign=True))
            *lines, last = _wrapped(f"  {printable(number)}", room - 1, 4)
            for line in lines:
                console.say(line)
            padding = " " * (room - Text(last).cell_len)
            console.say(last + padding + "".join(f"{cell:>{_VALUE}}" for cell in cells))


def _print_absent(analyses: Sequence[Analysis]) -> None:
    names = summary.refusals(analyses)
    if not names:
        return
    console.say()
    _say("Not measured", bold=True)
    for name in names:
        for i, one in enumerate(analyses):
            if name in one.refused:
                letter = f"{summary.LETTERS[i]}, " if len(analyses) > 1 else ""
                _say(f"{letter}{name}: {one.refused[name]}", indent=4, first=2)


def _title(name: str) -> None:
    console.say()
    _say(diagnostic(name).title, bold=True)


def _say(text: str, *, indent: int = 2, first: int = 0, bold: bool = False, style: str | None = None) -> None:
    for line in _wrapped(" " * first + printable(text), _width(), indent):
        console.say(line, style="bold" if bold else style)


def _width() -> int:
    return max(min(WIDTH, console.stream().width), 40)


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    """Return lines of at most ``width`` columns, all but the first indented; letters of two columns count as two."""
    stream = console.stream()
    first, *rest = Text(text).wrap(stream, width)
    if not rest:
        return [first.plain.rstrip()]
    left = text[len(first.plain) :].lstrip()
    more = Text(left).wrap(stream, width - indent)
    return [first.plain.rstrip(), *(f"{' ' * indent}{line.plain.rstrip()}" for line in more)]
