"""From a config to flags: argparse reads the words, the options' own checks judge them, a YAML file gives defaults."""

import argparse
import dataclasses
import difflib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

from vtk import console
from vtk.commands import _help
from vtk.errors import UsageError
from vtk.options import Config, Option, option_of, type_of
from vtk.options.config import flag_of, set_value, show, within
from vtk.options.files import read_values
from vtk.options.values import alternatives, from_words, is_list

__all__ = ["parse"]

T = TypeVar("T", bound=Config)
Preset = tuple[str, Callable[[str], Mapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Common(Config):
    """Flags that every command has."""

    config: Annotated[Path | None, Option("YAML file with defaults; flags win over it", "general", often=True)] = None
    json: Annotated[bool, Option("one JSON object on stdout, everything else on stderr", "general", often=True)] = False
    debug: Annotated[bool, Option("show the traceback of an error", "general")] = False


def parse(
    kind: type[T],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    positional: Sequence[str] = (),
    examples: Sequence[str] = (),
    preset: Preset | None = None,
) -> T:
    """Parse ``argv`` into an instance of the config ``kind``.

    Args:
        kind: of the config.
        argv: arguments after the command's name.
        prog: name shown in help.
        description: first paragraphs of the help.
        positional: options given without a flag, in order.
        examples: command lines shown in the help.
        preset: an option whose value names further defaults, and what reads them; the file of ``--config`` wins.

    Raises:
        UsageError: a flag or the YAML file is wrong, or ``kind`` refuses the values.
        SystemExit: help was asked for and printed.
    """
    if "" in argv:  # as a path it would be the folder one is in
        raise UsageError("an argument is empty (a variable that is not set?); give its value, or leave it out")
    if (every := "--help-all" in argv) or {"-h", "--help"} & set(argv):
        rest = [word for word in argv if word not in ("-h", "--help", "--help-all")]
        print(_help.text(
            kind, Common, _known(kind, rest, prog, positional, preset), prog=prog, description=description,
            positional=positional, examples=examples, every=every,
        ))  # fmt: skip
        raise SystemExit(0)
    values, common = _values(kind, argv, prog, positional, preset)
    console.set_json(bool(common.get("json")))
    for f in dataclasses.fields(kind):
        if f.name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            name = f.name.upper() if f.name in positional else flag_of(kind, f.name)
            told = option_of(kind, f.name).help
            raise UsageError(f"`{name}` is missing; give {_article(told)}{told}; see `{prog} --help`")
    return kind(**values)


def _values(
    kind: type[Config], argv: Sequence[str], prog: str, positional: Sequence[str], preset: Preset | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values that flags and files give, and those of the flags that every command has."""
    words = _read(kind, argv, prog, positional)
    given = {name: _value(kind, name, value, positional) for name, value in words.items()}
    common = {name: given.pop(name) for name in [f.name for f in dataclasses.fields(Common)] if name in given}
    return _file_defaults(kind, common.get("config"), given, preset) | given, common


def _known(
    kind: type[Config], argv: Sequence[str], prog: str, positional: Sequence[str], preset: Preset | None
) -> dict[str, Any]:
    """Return what help shows as defaults: what stands beside ``--help``, if it is right."""
    try:
        return _values(kind, argv, prog, positional, preset)[0]
    except UsageError:
        return {}


def _article(told: str) -> str:
    return "" if told.startswith(("a ", "an ", "the ")) or " " not in told or told.split()[0].endswith("s") else "a "


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def _read(kind: type[Config], argv: Sequence[str], prog: str, positional: Sequence[str]) -> dict[str, Any]:
    """Return the words that stand behind each option that is given."""
    parser = _Parser(prog=prog, add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    flags: list[str] = []
    singles: set[str] = set()
    switches: dict[str, bool] = {}  # and whether they may be left open
    for name in positional:
        parser.add_argument(name, nargs="*" if is_list(type_of(kind, name)) else "?")
    for f in (*dataclasses.fields(kind), *dataclasses.fields(Common)):
        if f.name in positional:
            continue
        owner = kind if f in dataclasses.fields(kind) else Common
        hint, option = type_of(owner, f.name), option_of(owner, f.name)
        flag = flag_of(owner, f.name)
        flags.append(flag)
        if bool in alternatives(hint):
            switches[flag] = type(None) in typing.get_args(hint)
            parser.add_argument(flag, dest=f.name, action="store_const", const=True)
            if not option.only_yes and owner is kind:
                flags.append(f"--no-{flag[2:]}")
                parser.add_argument(flags[-1], dest=f.name, action="store_const", const=False)
        elif option.flag:
            parser.add_argument(flag, dest=f.name, action="extend", nargs="+" if not positional else 1)
        elif _takes_several(hint):
            parser.add_argument(flag, dest=f.name, nargs="*")
        else:
            singles.add(flag)
            parser.add_argument(flag, dest=f.name, nargs="?", const=[])
    spelled = _spell(argv, flags, singles, switches)
    if unknown := next((word for word in spelled if word.startswith("--") and _name(word) not in flags), None):
        near = difflib.get_close_matches(_name(unknown), flags, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"unknown option `{_name(unknown)}`{hint}; see `{prog} --help-all`")
    parsed, rest = parser.parse_known_intermixed_args(spelled)
    if rest:
        raise UsageError(f"unexpected argument `{rest[0]}`; see `{prog} --help`")
    return {name: words for name, words in vars(parsed).items() if (words is not None and words != [])
            or f"{_flag(name)}" in spelled}  # fmt: skip


def _takes_several(hint: Any) -> bool:
    from vtk.options.values import is_size

    return is_size(hint) or any(str(one).startswith("tuple") for one in alternatives(hint))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _name(word: str) -> str:
    return word.partition("=")[0]


def _spell(argv: Sequence[str], flags: Sequence[str], singles: set[str], switches: Mapping[str, bool]) -> list[str]:
    """Write flags with ``-``, join one that takes a value to it, since the value may begin with ``-``, and ``=no``."""
    spelled: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            spelled.append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name in singles and not equals and words and not words[0].startswith("--"):
            spelled.append(f"{name}={words.pop(0)}")
        elif name in switches and (equals or (switches[name] and words[:1] in (["yes"], ["no"]))):
            value = value if equals else words.pop(0)
            off = f"--no-{name[2:]}"
            if value not in ("yes", "no") or (value == "no" and off not in flags):
                raise UsageError(f"`{name}` is {show(value)}; allowed is {'yes or no' if off in flags else 'yes'}")
            spelled.append(name if value == "yes" else off)
        else:
            spelled.append(f"{name}{equals}{value}")
    return spelled


def _value(kind: type[Config], name: str, words: Any, positional: Sequence[str]) -> Any:
    """Convert the words of an option to its value.

    Raises:
        UsageError: names the flag, the words and what is allowed.
    """
    owner: type[Config] = Common if name in {f.name for f in dataclasses.fields(Common)} else kind
    if isinstance(words, bool):
        return words
    hint, option = type_of(owner, name), option_of(owner, name)
    several = [words] if isinstance(words, str) else list(words)
    if name in positional or option.flag:  # commas are a name's own
        return set_value(owner, name, several if is_list(hint) else several[0], text=True)
    try:
        return set_value(owner, name, from_words(hint, several), text=True)
    except UsageError:
        raise
    except ValueError as error:
        allowed = option.allowed or within(str(error), option)
        told = " ".join(several) or "nothing"
        raise UsageError(f"`{flag_of(owner, name)}` is {show(told)}; allowed is {allowed}") from None


def _file_defaults(
    kind: type[Config], path: Path | None, given: Mapping[str, Any], preset: Preset | None
) -> dict[str, Any]:
    """Return what files say about the options: a preset's, and over it those of ``--config``."""
    values = {} if path is None else read_values(path, kind, "--config")
    if preset is None:
        return values
    name, read = preset
    chosen = given.get(name) or values.get(name)
    return values if chosen is None else {**read(chosen), **values, name: chosen}
