"""From a command line to a config: the options' own checks judge its words, a YAML file gives defaults."""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from vtk import console
from vtk.commands import _help, _words
from vtk.errors import UsageError
from vtk.options import Config, Option, option_of, type_of
from vtk.options.config import flag_of, set_value
from vtk.options.files import read_values
from vtk.options.option import show, within
from vtk.options.values import describe, from_words, is_list
from vtk.text import several_lines

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
    flags = _words.before_dashes(argv)
    if (every := "--help-all" in flags) or {"-h", "--help"} & set(flags):
        rest = [word for word in argv if word not in ("-h", "--help", "--help-all")]
        known = _known(kind, rest, prog, positional, preset)
        text = _help.text(
            kind, Common, known, prog=prog, description=description, positional=positional, examples=examples,
            every=every,
        )  # fmt: skip
        print(several_lines(text))
        raise SystemExit(0)
    values, common = _values(kind, argv, prog, positional, preset)
    console.set_json(bool(common.get("json")))
    order = {name: i for i, name in enumerate(positional)}
    for f in sorted(dataclasses.fields(kind), key=lambda f: order.get(f.name, len(order))):
        if f.name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            name = f.name.upper() if f.name in positional else flag_of(kind, f.name)
            raise UsageError(f"`{name}` is missing; give {_wanted(kind, f.name)}; see `{prog} --help`")
    return kind(**values)


def _values(
    kind: type[Config], argv: Sequence[str], prog: str, positional: Sequence[str], preset: Preset | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values that flags and files give, and those of the flags that every command has."""
    words = _words.read(kind, Common, argv, prog, positional)
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


def _value(kind: type[Config], name: str, words: Any, positional: Sequence[str]) -> Any:
    """Convert the words of an option to its value.

    Raises:
        UsageError: names the flag, the words and what is allowed.
    """
    owner: type[Config] = Common if name in {f.name for f in dataclasses.fields(Common)} else kind
    if isinstance(words, bool):
        return words
    hint, option = type_of(owner, name), option_of(owner, name)
    several = list(words)
    if not several:
        allowed = option.allowed or within(describe(hint), option)
        raise UsageError(f"`{flag_of(owner, name)}` is nothing; allowed is {allowed}")
    if name in positional or option.flag:  # commas are a name's own
        return set_value(owner, name, several if is_list(hint) else several[0], text=True)
    try:
        return set_value(owner, name, from_words(hint, several), text=True)
    except UsageError:
        raise
    except ValueError as error:
        allowed = option.allowed or within(str(error), option)
        raise UsageError(f"`{flag_of(owner, name)}` is {show(' '.join(several))}; allowed is {allowed}") from None


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
