"""Command lines to configs: words are converted and checked by the options, a YAML file gives defaults."""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from vtk import console
from vtk.commands import _arguments, _help
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
    """Options of every command."""

    config: Annotated[Path | None, Option("YAML file with defaults; options override it", "general", often=True)] = None
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
        preset: an option whose value names further defaults, and their reader; the file of ``--config`` overrides them.

    Raises:
        UsageError: a flag or the YAML file is wrong, or ``kind`` refuses the values.
        SystemExit: help was asked for and printed.
    """
    if "" in argv:  # as a path it would be the current folder
        raise UsageError("an argument is empty (an unset variable?); give its value, or leave it out")
    flags = _arguments.before_dashes(argv)
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
    """Return the values of a command's own options, and those of the options of every command."""
    words = _arguments.read(kind, Common, argv, prog, positional)
    values = {name: _value(kind, name, value, positional) for name, value in words.items()}
    common = {name: values.pop(name) for name in [f.name for f in dataclasses.fields(Common)] if name in values}
    return _file_defaults(kind, common.get("config"), values, preset) | values, common


def _known(
    kind: type[Config], argv: Sequence[str], prog: str, positional: Sequence[str], preset: Preset | None
) -> dict[str, Any]:
    """Return the defaults that help shows: the values given beside ``--help``, if they are valid."""
    try:
        return _values(kind, argv, prog, positional, preset)[0]
    except UsageError:
        return {}


def _wanted(kind: type[Config], name: str) -> str:
    """Return what an option takes, as the object of "give"."""
    hint, text = type_of(kind, name), option_of(kind, name).help
    if typing.get_origin(hint) is Literal:
        return describe(hint)
    bare = text.startswith(("a ", "an ", "the ")) or " " not in text or text.split()[0].endswith("s")
    return text if bare else f"a {text}"


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
    if option.convert is not None and typing.get_origin(hint) is Literal:  # an earlier name of a choice
        several = [option.convert(word) for word in several]
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
    """Return the values from files: a preset's, overridden by those of ``--config``."""
    values = {} if path is None else read_values(path, kind, "--config")
    if preset is None:
        return values
    name, read = preset
    selected = given.get(name) or values.get(name)
    return values if selected is None else {**read(selected), **values, name: selected}
