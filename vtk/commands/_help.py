"""Help texts in 80 columns: the common options of a command, or all of them, in titled groups."""

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from vtk.options import Config, groups_of, option_of, type_of
from vtk.options.config import flag_of
from vtk.options.values import alternatives, is_list, placeholder

WIDTH = 80
_INDENT = 24
_FIRST, _LAST = ("source", "data"), ("running", "output", "general")


def text(
    kind: type[Config],
    common: type[Config],
    defaults: Mapping[str, Any],
    *,
    prog: str,
    description: str,
    positional: Sequence[str] = (),
    examples: Sequence[str] = (),
    every: bool = False,
) -> str:
    """Return the help of a command.

    Args:
        kind: config of the command.
        common: config with the flags of every command.
        defaults: values that replace the config's own, for instance those of a recipe.
        prog: name of the command.
        description: first paragraphs.
        positional: options given without a flag, in order.
        examples: command lines.
        every: show all options, not only the common ones.
    """
    shown = {name: _positional(kind, name) for name in positional}
    lines = [f"usage: {prog} {' '.join([*shown.values(), '[OPTIONS]'])}", ""]
    for paragraph in description.replace("``", "`").strip().split("\n\n"):
        lines += [*textwrap.wrap(paragraph, WIDTH, break_on_hyphens=False), ""]
    for line in examples:
        lines += textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="      ", break_long_words=False,
                               break_on_hyphens=False)  # fmt: skip
    hidden = 0
    for owner, title, names in _sections(kind, common if every else None):
        kept = [n for n in names if every or option_of(owner, n).often or n in positional or _required(owner, n)]
        hidden += len(names) - len(kept)
        if kept:
            lines += ["", f"{title}:"]
        for name in [*(n for n in positional if n in kept), *(n for n in kept if n not in positional)]:
            lines += _entry(owner, name, shown.get(name), defaults)
    lines.append("")
    if every:
        lines.append("-h, --help shows only the most common options.")
    else:
        lines.append("Every command takes --config FILE.yaml, --json and --debug.")
        if hidden:
            lines.append(f"{prog} --help-all shows {hidden} more option{'s' * (hidden != 1)}.")
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def _sections(kind: type[Config], common: type[Config] | None) -> list[tuple[type[Config], str, list[str]]]:
    """Return the groups of options: sources first, then in the order of the config, general options last."""
    own = groups_of(kind)
    order = [*_FIRST, *(title for title in own if title not in (*_FIRST, *_LAST)), *_LAST]
    found = [(kind, title, own[title]) for title in order if title in own]
    return found if common is None else [*found, *((common, *one) for one in groups_of(common).items())]


def _positional(kind: type[Config], name: str) -> str:
    word = option_of(kind, name).metavar or name.upper()
    word = f"{word} …" if is_list(type_of(kind, name)) else word
    return word if _required(kind, name) else f"[{word}]"


def _required(kind: type[Config], name: str) -> bool:
    (f,) = (f for f in dataclasses.fields(kind) if f.name == name)
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _entry(kind: type[Config], name: str, positional: str | None, defaults: Mapping[str, Any]) -> list[str]:
    """Return the lines of an option: its flag, then its help and default beside or below it."""
    option, hint = option_of(kind, name), type_of(kind, name)
    (own,) = (f.default for f in dataclasses.fields(kind) if f.name == name)
    default = defaults.get(name, own)
    text = option.help
    if bool in alternatives(hint):
        flag = flag_of(kind, name)
        head, text = (f"--no-{flag[2:]}", option.off) if own is True else (flag, text)
        if own is None and not option.only_yes:  # unset by default
            head = f"{flag}, --no-{flag[2:]}"
    else:
        head = positional or f"{flag_of(kind, name)} {option.metavar or placeholder(hint)}"
        if _worth_showing(default):
            text += f" (default: {_shown(default)})"
        elif _required(kind, name):
            text += " (required)"
    if not positional and len(head) > 60 and "{" in head:  # too many choices for one line: they go into the help
        text = f"{option.help}; one of {', '.join(_choices(hint))}{text.removeprefix(option.help)}"
        head = f"{flag_of(kind, name)} NAME"
    body = textwrap.wrap(text, WIDTH - _INDENT, break_on_hyphens=False)
    head = f"  {head}"
    if len(head) <= _INDENT - 2:
        body[0] = head.ljust(_INDENT) + body[0]
        return [body[0], *(" " * _INDENT + line for line in body[1:])]
    return [head, *(" " * _INDENT + line for line in body)]


def _choices(hint: Any) -> list[str]:
    return placeholder(hint).strip("{}").split(",")


def _worth_showing(default: Any) -> bool:
    return default not in (None, (), "", False, dataclasses.MISSING)


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return ",".join(map(_shown, default))
    return f"{default:g}" if isinstance(default, float) else str(default)
