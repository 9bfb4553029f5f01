"""``--input-name`` and ``--output-name``: names of an exported model's inputs and outputs; free of torch.

Everything here calls them by the toolkit's own terms. A name stands in the written file alone: what writes it renames
last (`vtk_export.graph.rename`), and what reads it maps names to terms first (`vtk.runtime.export_facts.Facts.names`).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

from vtk.errors import UsageError
from vtk.options import Option

_INPUTS = ("pixel_values", "images", "encoded", "task")
_NAME = r"[A-Za-z_][A-Za-z0-9_.:/-]{0,127}"
_ALLOWED = "[OUR_NAME=]NAME; NAME begins with a letter or _, then letters, digits and . : / - _"
_PATTERN = rf"([a-z_]+=)?{_NAME}"

InputName = Annotated[
    tuple[str, ...],
    Option("name of the image input; OUR_NAME=NAME for another input", "format", unique=True, flag="input-name",
           metavar="NAME", pattern=_PATTERN, allowed=_ALLOWED),
]  # fmt: skip
OutputName = Annotated[
    tuple[str, ...],
    Option("name of the first output; OUR_NAME=NAME for another, such as features=embedding", "format", unique=True,
           flag="output-name", metavar="NAME", pattern=_PATTERN, allowed=_ALLOWED),
]  # fmt: skip


def parse_names(inputs: Sequence[str], outputs: Sequence[str], *, image: str, answer: str) -> dict[str, str]:
    """Return the names that were given, by the toolkit's own.

    Args:
        inputs: of ``--input-name``.
        outputs: of ``--output-name``.
        image: what the toolkit calls the input that a bare NAME is for.
        answer: the same of the outputs.

    Raises:
        UsageError: two names for one tensor, one name for two, or an output's name among those of inputs.
    """
    names: dict[str, str] = {}
    for flag, given, first in (("--input-name", inputs, image), ("--output-name", outputs, answer)):
        for text in given:
            before, _, name = text.rpartition("=")
            if before and (before in _INPUTS) is not (flag == "--input-name"):
                kind = "input" if flag == "--input-name" else "output"
                raise UsageError(f"`{flag}` {text}: no {kind} is called `{before}` here; give {kind}s alone")
            if (term := before or first) in names:
                raise UsageError(f"`{flag}` {text}: `{term}` is called {names[term]} already; give one name for each")
            if name in names.values():
                raise UsageError(f"`{flag}` {text}: another tensor is called {name} already; give it another name")
            names[term] = name
    return names


def check_names(names: Mapping[str, str], inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, str]:
    """Return the names that differ from the toolkit's own, if all are of this model's inputs and outputs.

    Args:
        names: of `parse_names`.
        inputs: of the model, as the toolkit calls them.
        outputs: the same.

    Raises:
        UsageError: a name for a tensor that the model does not have, or one that another of its tensors has.
    """
    terms = (*inputs, *outputs)
    for term, name in names.items():
        if term not in terms:
            flag = "--input-name" if term in _INPUTS else "--output-name"
            has = " and ".join(f"`{each}`" for each in (inputs if flag == "--input-name" else outputs))
            raise UsageError(f"`{flag}` {term}={name}: the model has no `{term}`; it has {has}")
    called = [names.get(term, term) for term in terms]
    if twice := [name for name in called if called.count(name) > 1]:
        raise UsageError(f"two of the model's inputs and outputs would be called `{twice[0]}`; give another name")
    return {term: name for term, name in names.items() if term != name}
