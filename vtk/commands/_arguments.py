"""Parser of command lines: assigns words to the options of a config.

argparse would need workarounds: for a list that ends where a positional begins, a value that begins with a dash, or
``--fuse`` and ``--fuse no``.
"""

import dataclasses
import difflib
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vtk.errors import UsageError
from vtk.options import Config, Option, option_of, type_of
from vtk.options.config import flag_of
from vtk.options.option import show
from vtk.options.values import alternatives, from_words, is_list, is_size

_NUMBER = re.compile(r"-\.?\d.*")


@dataclass(frozen=True)
class Flag:
    """A flag of a command.

    Attributes:
        name: field of the config.
        hint: its type.
        option: its help, bounds and choices.
        says: value that the flag gives to a switch; None for other options.
    """

    name: str
    hint: Any
    option: Option
    says: bool | None = None

    @property
    def open(self) -> bool:
        """Whether it is a switch with a third state, unset; it takes ``yes`` or ``no``."""
        return self.says is True and type(None) in typing.get_args(self.hint)

    @property
    def several(self) -> bool:
        """Whether it takes several words."""
        return is_size(self.hint) or any(typing.get_origin(one) is tuple for one in alternatives(self.hint))

    def fits(self, word: str) -> bool:
        """Return whether a word can be another value of a list or a size, by type and form."""
        (kind,) = [one for one in alternatives(self.hint) if typing.get_origin(one) is tuple]
        if not is_list(kind) and not is_size(self.hint):
            return True
        try:
            values = from_words(tuple[int, ...] if is_size(self.hint) else kind, [word])
        except ValueError:
            return False
        return not isinstance(values[0], str) or not self.option.fault(values[:1], word)


def flags_of(kind: type[Config], common: type[Config], positional: Sequence[str]) -> dict[str, Flag]:
    """Return the flags of a config, and those of every command."""
    flags = {}
    for owner in (kind, common):
        for f in dataclasses.fields(owner):
            if f.name in positional:
                continue
            hint, option, flag = type_of(owner, f.name), option_of(owner, f.name), flag_of(owner, f.name)
            switch = bool in alternatives(hint)
            flags[flag] = Flag(f.name, hint, option, True if switch else None)
            if switch and owner is kind and not option.only_yes:
                flags[f"--no-{flag[2:]}"] = Flag(f.name, hint, option, False)
    return flags


def before_dashes(argv: Sequence[str]) -> Sequence[str]:
    """Return the words before ``--``; after it nothing is a flag."""
    return argv[: argv.index("--")] if "--" in argv else argv


def read(
    kind: type[Config], common: type[Config], argv: Sequence[str], prog: str, positional: Sequence[str]
) -> dict[str, bool | list[str]]:
    """Return the words given for each option, or the value of a switch. Of a repeated flag the last one counts.

    A list takes all words up to the next flag; a list begun with ``=`` takes the words that fit its type.

    Args:
        kind: config of the command.
        common: config with the flags of every command.
        argv: the words.
        prog: name of the command, for messages.
        positional: options given without a flag, in order; a list among them takes the rest.

    Raises:
        UsageError: an unknown flag, a switch with a value, or an argument too many.
    """
    flags = flags_of(kind, common, positional)
    values_of: dict[str, bool | list[str]] = {}
    words = list(before_dashes(argv))
    after_dashes = list(argv[len(words) + 1 :])
    arguments: list[str] = []
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            if word.startswith("-") and len(word) > 1 and not _NUMBER.fullmatch(word):
                raise UsageError(f"unexpected argument `{word}`; see `{prog} --help`")
            arguments.append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name not in flags:
            raise _unknown(name, flags, prog)
        flag, values = flags[name], [value] if equals else []
        if flag.says is not None:
            if not equals and flag.open and words[:1] in (["yes"], ["no"]):
                values = [words.pop(0)]
            values_of[flag.name] = _switch_value(name, flag, values, flags)
            continue
        each = bool(flag.option.flag)  # repeatable; without positionals it takes several values at once
        many = flag.several and not (each and positional)
        while words and not words[0].startswith("--") and (many or not values):
            if equals and not each and not flag.fits(words[0]):
                break
            values.append(words.pop(0))
        earlier = values_of.get(flag.name)
        values_of[flag.name] = [*earlier, *values] if each and isinstance(earlier, list) else values
    return values_of | _positionals(kind, [*arguments, *after_dashes], prog, positional)


def _switch_value(name: str, flag: Flag, values: Sequence[str], flags: dict[str, Flag]) -> bool:
    if not values:
        return bool(flag.says)
    both = flag.says is True and f"--no-{name[2:]}" in flags
    if flag.says is False or values[0] not in ("yes", "no") or (values[0] == "no" and not both):
        allowed = "yes or no" if both else "no value" if flag.says is False else "yes"
        raise UsageError(f"`{name}` is {show(values[0])}; allowed is {allowed}")
    return values[0] == "yes"


def _positionals(
    kind: type[Config], arguments: Sequence[str], prog: str, positional: Sequence[str]
) -> dict[str, bool | list[str]]:
    """Assign the arguments without a flag to the positional options."""
    values_of: dict[str, bool | list[str]] = {}
    rest = list(arguments)
    for name in positional:
        count = len(rest) if is_list(type_of(kind, name)) else 1
        if rest[:count]:
            values_of[name], rest = rest[:count], rest[count:]
    if rest:
        raise UsageError(f"unexpected argument `{rest[0]}`; see `{prog} --help`")
    return values_of


def _unknown(name: str, flags: dict[str, Flag], prog: str) -> UsageError:
    near = difflib.get_close_matches(name[2:], [flag[2:] for flag in flags], 1)
    hint = f"; did you mean --{near[0]}?" if near else ""
    return UsageError(f"unknown option `{name}`{hint}; see `{prog} --help-all`")
