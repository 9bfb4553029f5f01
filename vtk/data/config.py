"""Options of reading images, and of ``vtk data audit``; imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.options.shared import Folder, Overwrite, Seed, ValSplit, Workers

MultiLabel = Annotated[
    bool,
    Option("multi-label: several labels per image; DATA is a table or folders named by labels", "data", often=True),
]

_Page = Annotated[
    Path | None,
    Option("HTML page to write, such as audit.html; replaces an earlier audit page", "output", often=True),
]  # fmt: skip

_ONE = r"comma|semicolon|tab|space|pipe|\\t|."
_SEPARATOR = "comma, semicolon, tab, space, pipe, or one character"
FieldSeparator = Annotated[
    str | None,
    Option("column separator of a table of labels (default: detected)", "data", pattern=_ONE, allowed=_SEPARATOR),
]
LabelSeparator = Annotated[
    str | None,
    Option(
        "separator between the labels of an image in a table (default: detected)",
        "data",
        pattern=_ONE,
        allowed=_SEPARATOR,
    ),
]


def range_texts(value: Any) -> Any:
    """Return the ends of ``--value-range`` as text."""
    if isinstance(value, (list, tuple)):
        return tuple(item if isinstance(item, str) else f"{item:.17g}" if isinstance(item, float) else str(item)
                     for item in value)  # fmt: skip
    return value


@dataclass(frozen=True, kw_only=True)
class ImageOptions(Config):
    """Options of scanning images, with what is done about bad files and leaks."""

    GROUP: ClassVar[str] = "data"

    on_bad_image: Annotated[
        Literal["skip", "fail"], Option("unreadable images: skip and count them, or fail before training")
    ] = "skip"
    on_leak: Annotated[
        Literal["warn", "fail"],
        Option("held-out images that are byte-identical to training images: warn, or fail before training"),
    ] = "warn"
    field_separator: FieldSeparator = None
    keep_empty_classes: Annotated[bool, Option("keep classes that have no images")] = False
    max_pixels: Annotated[
        int,
        Option(
            "largest image, in pixels (width × height); larger ones count as unreadable; stored in the pack", least=1
        ),
    ] = 178_956_970
    value_range: Annotated[
        tuple[str, ...],
        Option(
            "values mapped to 0 and 255 in images of more than 8 bits: numbers or percentiles (p1 p99)",
            metavar="LOW HIGH",
            convert=range_texts,
        ),
    ] = ()
    in_chans: Annotated[
        int,
        Option("input channels; TIFF pages and samples are stacked; other than 3 adapts the stem", least=1, most=1024),
    ] = 3


@dataclass(frozen=True, kw_only=True)
class AuditConfig(ImageOptions):
    """Options of the audit: reading the images, and the page.

    Raises:
        UsageError: a value is out of range, or two values contradict each other.
    """

    out: _Page = None
    multi_label: MultiLabel = False
    label_separator: LabelSeparator = None
    val_split: ValSplit = 0.2
    seed: Seed = 0
    workers: Workers = None
    cache: Annotated[
        bool, Option("reuse and store the results of decoding", "running", off="decode again, store nothing")
    ] = True
    overwrite: Overwrite = False

    def check(self) -> None:
        """Refuse options that contradict each other."""
        if self.multi_label and self.keep_empty_classes:
            raise UsageError("`--keep-empty-classes` and --multi-label exclude each other; give one of them")
        if self.label_separator is not None and not self.multi_label:
            raise UsageError("`--label-separator` needs --multi-label; give both, or leave it out")


@dataclass(frozen=True, kw_only=True)
class AuditCommand(AuditConfig):
    """The command ``vtk data audit``."""

    data: Folder
