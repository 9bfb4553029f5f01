"""From a frozen config dataclass to flags: tyro draws help and type errors, a YAML file gives the defaults.

tyro was chosen because it builds the whole command line, with help and type checks, from the dataclasses that the
library's functions take anyway. The configs stay plain: what only the command line needs is added here.
"""

import contextlib
import dataclasses
import io
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from vtk import console
from vtk.errors import UsageError
from vtk.values import from_yaml, read_values

__all__ = ["from_yaml", "parse"]

T = TypeVar("T")
Preset = tuple[str, Callable[[str], Mapping[str, Any]]]
_SIZE = int | tuple[int, int] | None
_SWITCH = bool | None


@dataclass(frozen=True)
class _Common:
    """Flags that every command has."""

    config: Path | None = field(default=None, metadata={"help": "YAML file with defaults; flags win over it"})
    json: bool = field(default=False, metadata={"help": "one JSON object on stdout, everything else on stderr"})
    debug: bool = field(default=False, metadata={"help": "show the traceback of an error"})


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
    """Parse ``argv`` into an instance of the config dataclass ``kind``.

    Args:
        kind: frozen dataclass; help texts are in ``metadata["help"]`` of its fields.
        argv: arguments after the command's name.
        prog: name shown in help.
        description: first paragraph of the help.
        positional: fields given without a flag, in order.
        examples: command lines shown under the help.
        preset: a field whose value names further defaults, and what reads them; the file of ``--config`` wins.

    Raises:
        UsageError: a flag or the YAML file is wrong, or ``kind`` refuses the values.
    """
    if "" in argv:  # as a path it would be the folder one is in
        raise UsageError("an argument is empty (a variable that is not set?); give its value, or leave it out")
    common_names = {f.name for f in dataclasses.fields(_Common)}
    flags = _flags_class(kind, positional)
    defaults = _file_defaults(kind, argv, preset)
    default: Any = None
    if defaults:
        values = {f.name: defaults.get(f.name, _default(f)) for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
        values |= dict.fromkeys(_repeated(kind), ())  # tyro would add what flags give to the file's
        default = flags(**values, **{f.name: f.default for f in dataclasses.fields(_Common)})
    text = description.replace("``", "`").strip()
    if examples:
        text += "\n\n" + "\n".join(f"  {line}" for line in examples)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed = tyro.cli(flags, args=_spell_switches(kind, argv), prog=prog, description=text, default=default)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UsageError(f"{_one_line(complaint.getvalue())}; see `{prog} --help`") from None
    console.set_json(parsed.json)
    found = {f.name: getattr(parsed, f.name) for f in dataclasses.fields(flags) if f.name not in common_names}
    found |= {name: defaults[name] for name in _repeated(kind) if not found[name] and name in defaults}
    return kind(**found)


def _repeated(kind: Any) -> list[str]:
    """Return the fields whose flag is given once for each value: their metadata has the ``flag``'s name."""
    return [f.name for f in dataclasses.fields(kind) if "flag" in f.metadata]


def _flags_class(kind: type, positional: Sequence[str]) -> Any:
    """Build ``kind`` again with tyro's markers on each field, plus the common flags."""
    hints = typing.get_type_hints(kind)
    own = {f.name: f for f in dataclasses.fields(kind)}
    order = [own[name] for name in positional] + [f for f in own.values() if f.name not in positional]
    fields = []
    for f in [*order, *dataclasses.fields(_Common)]:
        hint = hints.get(f.name, typing.get_type_hints(_Common).get(f.name))
        # tyro reads help as rich markup when it draws the box, so brackets are kept out of the markup
        options: dict[str, Any] = {"help_behavior_hint": ""} if f.default in ((), None) else {}
        markers: list[Any] = [tyro.conf.arg(help=f.metadata.get("help", ""), **options)]
        if f.name in positional:
            markers = [tyro.conf.arg(help=f.metadata.get("help", ""), metavar=f.name.upper()), tyro.conf.Positional]
        elif f.name not in own:
            markers.append(tyro.conf.FlagCreatePairsOff)
        if "flag" in f.metadata:
            named = tyro.conf.arg(
                name=f.metadata["flag"], help=f.metadata["help"], metavar=f.metadata["metavar"], help_behavior_hint=""
            )
            markers = [named, tyro.conf.UseAppendAction]
        elif (element := _list_element(hint)) is not None:
            markers.append(_list_spec(element))
        elif hint == _SIZE:
            markers.append(_size_spec())
        elif hint == _SWITCH:
            markers.append(_switch_spec())
        annotated = Annotated[(hint, *markers)]  # type: ignore[valid-type]
        if f.default is not dataclasses.MISSING:
            fields.append((f.name, annotated, field(default=f.default)))
        elif f.default_factory is not dataclasses.MISSING:
            fields.append((f.name, annotated, field(default_factory=f.default_factory)))
        else:
            fields.append((f.name, annotated, field()))
    return dataclasses.make_dataclass(f"{kind.__name__}Flags", fields, frozen=True, kw_only=True)


def _list_element(hint: Any) -> type | None:
    """Return X for ``tuple[X, ...]`` and ``tuple[X, ...] | None``, else None."""
    for option in typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,):
        args = typing.get_args(option)
        if typing.get_origin(option) is tuple and args[1:] == (Ellipsis,) and args[0] in (int, float, str):
            return args[0]
    return None


def _list_spec(element: type) -> Any:
    """Accept ``1,2,4`` as well as ``1 2 4``; commas inside of brackets are a value's own."""
    name = element.__name__.upper()

    def from_str(args: list[str]) -> Any:
        parts = [part.strip() for arg in args for part in re.split(r",(?![^\[\]]*\])", arg)]
        return tuple(element(part) for part in parts if part)

    def to_str(value: Any) -> list[str]:
        return ["None"] if value is None else [str(v) for v in value]

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"{name}[,{name}…]",
        instance_from_str=from_str,
        is_instance=lambda v: v is None or (isinstance(v, tuple) and all(isinstance(x, (element, int)) for x in v)),
        str_from_instance=to_str,
    )


def _size_spec() -> Any:
    """Accept ``48``, ``48 64``, ``48,64`` and ``48x64``, height first."""

    def from_str(args: list[str]) -> Any:
        parts = [part for arg in args for part in re.split("[,x×]", arg.strip())]
        if parts == ["None"]:
            return None
        if not 1 <= len(parts) <= 2 or not all(re.fullmatch(r"[+-]?\d{1,9}", part) for part in parts):
            raise ValueError(f"{' '.join(args) or 'nothing'!r} is no size; give one side, or height and width")
        return int(parts[0]) if len(parts) == 1 else (int(parts[0]), int(parts[1]))

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="PIXELS|HEIGHT WIDTH",
        instance_from_str=from_str,
        is_instance=lambda v: v is None or isinstance(v, (int, tuple)),
        str_from_instance=lambda v: [str(side) for side in (v if isinstance(v, tuple) else (v,))],
    )


def _spell_switches(kind: type, argv: Sequence[str]) -> list[str]:
    """Write ``--fuse`` as ``--fuse yes`` and ``--no-fuse`` as ``--fuse no``, for flags that may also be left out."""
    names = [name.replace("_", "-") for name, hint in typing.get_type_hints(kind).items() if hint == _SWITCH]
    spelled: dict[str, list[str]] = {f"--no-{name}": [f"--{name}", "no"] for name in names}
    spelled |= {f"--{name}": [f"--{name}", "yes"] for name in names}
    return [word for i, arg in enumerate(argv) for word in _spell(arg, argv[i + 1 : i + 2], spelled)]


def _spell(arg: str, following: Sequence[str], spelled: Mapping[str, list[str]]) -> list[str]:
    flag = arg.replace("_", "-") if arg.startswith("--") else arg
    return [arg] if flag not in spelled or following in (["yes"], ["no"]) else spelled[flag]


def _switch_spec() -> Any:
    """Accept yes and no; `_spell_switches` writes the bare flags that way."""

    def from_str(args: list[str]) -> bool | None:
        known = {"yes": True, "no": False, "None": None}
        if args[0] not in known:
            raise ValueError(f"{args[0]!r} is neither yes nor no")
        return known[args[0]]

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="[yes|no]",
        instance_from_str=from_str,
        is_instance=lambda v: v is None or isinstance(v, bool),
        str_from_instance=lambda v: ["None" if v is None else "yes" if v else "no"],
    )


def _one_line(box: str) -> str:
    """Return the sense of tyro's framed message: what was wrong, then the flag's own help or a near flag.

    Where the terminal is said to take ASCII only, the frame is dashes and its title a section of its own.
    """
    lines = [line.strip(" │") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    sections = [" ".join(part.split()) for part in re.split(r"\n(?:─+|-{10,})\n", "\n".join(lines))]
    sections = sections if "╭" in box else sections[1:]
    kept = [part for part in sections if part and not part.startswith("For full helptext")]
    text = "; ".join(part.removeprefix("Argument helptext:").strip() for part in kept) or "the flags cannot be read"
    # of a flag with several types tyro tells what each of them said; what all of them allow is in the first half
    several = r"no type matching (\S+) could be instantiated from \['([^;]*?)'\]\. Got errors: [^;]*"
    text = re.sub(several, r"'\2' is not \1", text)
    text = re.sub(r"invalid literal for int\(\) with base 10: ('[^']*')", r"\1 is not a whole number", text)
    return re.sub(r"could not convert string to float: ('[^']*')", r"\1 is not a number", text)


def _default(f: dataclasses.Field) -> Any:
    if f.default is not dataclasses.MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else tyro.MISSING


def _file_defaults(kind: type, argv: Sequence[str], preset: Preset | None) -> dict[str, Any]:
    """Return what files say about the options: a preset's, and over it those of ``--config``."""
    path = _given("config", argv)
    values = {} if path is None else read_values(Path(path), kind, "--config")
    if preset is None:
        return values
    name, read = preset
    chosen = _given(name, argv) or values.get(name)
    return values if chosen is None else {**read(chosen), **values, name: chosen}


def _given(flag: str, argv: Sequence[str]) -> str | None:
    """Return what a command line gives for a flag, as far as can be seen before it is parsed; the last one counts."""
    found = None
    for i, arg in enumerate(argv):
        if arg == f"--{flag}" and i + 1 < len(argv):
            found = argv[i + 1]
        elif arg.startswith(f"--{flag}="):
            found = arg.partition("=")[2]
    return found
