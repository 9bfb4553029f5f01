"""From a config to flags: argparse reads the words, the options' own checks judge them, a YAML file gives defaults."""

import argparse
import dataclasses
import difflib
import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from vtk import console
from vtk.commands import _help
from vtk.errors import UsageError
from vtk.options import Config, Option, option_of, type_of
from vtk.options.config import flag_of, set_value, show, within
from vtk.options.files import read_values
from vtk.options.values import alternatives, describe, from_words, is_list, is_size

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
    flags = _before_dashes(argv)
    if (every := "--help-all" in flags) or {"-h", "--help"} & set(flags):
        rest = [word for word in argv if word not in ("-h", "--help", "--help-all")]
        print(_help.text(
            kind, Common, _known(kind, rest, prog, positional, preset), prog=prog, description=description,
            positional=positional, examples=examples, every=every,
        ))  # fmt: skip
        raise SystemExit(0)
    values, common = _values(kind, argv, prog, positional, preset)
    console.set_json(bool(common.get("json")))
    order = {name: i for i, name in enumerate(positional)}
    for f in sorted(dataclasses.fields(kind), key=lambda f: order.get(f.name, len(order))):
        if f.name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            name = f.name.upper() if f.name in positional else flag_of(kind, f.name)
            raise UsageError(f"`{name}` is missing; give {_wanted(kind, f.name)}; see `{prog} --help`")
    return kind(**values)


def _before_dashes(argv: Sequence[str]) -> Sequence[str]:
    """Return the words before ``--``, behind which nothing is a flag."""
    return argv[: argv.index("--")] if "--" in argv else argv


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


def _wanted(kind: type[Config], name: str) -> str:
    """Return what an option wants, after "give"."""
    hint, told = type_of(kind, name), option_of(kind, name).help
    if typing.get_origin(hint) is Literal:
        return describe(hint)
    bare = told.startswith(("a ", "an ", "the ")) or " " not in told or told.split()[0].endswith("s")
    return told if bare else f"a {told}"


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def _read(kind: type[Config], argv: Sequence[str], prog: str, positional: Sequence[str]) -> dict[str, Any]:
    """Return the words that stand behind each option that is given."""
    parser = _Parser(prog=prog, add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    flags: list[str] = []
    singles: set[str] = set()
    lists: dict[str, Callable[[str], bool]] = {}  # and whether a word may be one of its values
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
            lists[flag] = functools.partial(_fits, hint, option)
            parser.add_argument(flag, dest=f.name, nargs=1)
        else:
            singles.add(flag)
            parser.add_argument(flag, dest=f.name)
    before = _before_dashes(argv)
    spelled = _spell(before, flags, singles, lists, switches)
    if unknown := next((word for word in spelled if word.startswith("--") and _name(word) not in flags), None):
        near = difflib.get_close_matches(_name(unknown)[2:], [flag[2:] for flag in flags], 1)
        hint = f"; did you mean --{near[0]}?" if near else ""
        raise UsageError(f"unknown option `{_name(unknown)}`{hint}; see `{prog} --help-all`")
    spelled += [_GLUE + word for word in argv[len(before) + 1 :]]  # argparse must not take one for a flag
    parsed, rest = parser.parse_known_intermixed_args(spelled)
    if rest:
        raise UsageError(f"unexpected argument `{rest[0].removeprefix(_GLUE)}`; see `{prog} --help`")
    return {name: _apart(words) for name, words in vars(parsed).items() if words is not None and words != []}


_GLUE = "\0"
"""No word of a command line has it."""


def _apart(words: Any) -> Any:
    """Return the words that `_read` and `_spell` joined, or marked as no flags."""
    if isinstance(words, str):
        return words.removeprefix(_GLUE)
    if isinstance(words, bool):
        return words
    return [one for word in words for one in word.removeprefix(_GLUE).split(_GLUE)]


def _fits(hint: Any, option: Option, word: str) -> bool:
    """Tell whether a word may be one value more of a list or a size, by its type and its form."""
    (kind,) = [one for one in alternatives(hint) if str(one).startswith("tuple")]
    if not is_list(kind) and not is_size(hint):
        return True
    try:
        values = from_words(tuple[int, ...] if is_size(hint) else kind, [word])
    except ValueError:
        return False
    return not isinstance(values[0], str) or not option.fault(values[:1], word)


def _takes_several(hint: Any) -> bool:
    return is_size(hint) or any(str(one).startswith("tuple") for one in alternatives(hint))


def _name(word: str) -> str:
    return word.partition("=")[0]


def _spell(
    argv: Sequence[str],
    flags: Sequence[str],
    singles: set[str],
    lists: Mapping[str, Callable[[str], bool]],
    switches: Mapping[str, bool],
) -> list[str]:
    """Write flags with ``-``, join those that take values to them, since a value may begin with ``-``, and ``=no``.

    A list takes all words up to the next flag; begun with ``=``, it takes those that fit it: another is an argument.
    """
    spelled: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            spelled.append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name in singles and not equals:
            spelled.append(f"{name}={words.pop(0) if words and not words[0].startswith('--') else ''}")
        elif name in lists:
            values = [value] if equals else []
            while words and not words[0].startswith("--") and (not equals or lists[name](words[0])):
                values.append(words.pop(0))
            spelled.append(f"{name}={_GLUE.join(values)}")
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
    several = [word for word in ([words] if isinstance(words, str) else words) if word]
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
