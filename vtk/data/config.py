"""Options of reading a folder of images, and of ``vtk data audit``; free of torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.options.shared import Folder, Overwrite, Seed, ValSplit, Workers

MultiLabel = Annotated[
    bool,
    Option("several labels an image; DATA is a table or label folders", "data", often=True),
]

_Page = Annotated[
    Path | None, Option("page to write, such as audit.html; an earlier audit is replaced (default: none)", "output",
                        often=True)
]  # fmt: skip

_ONE = r"comma|semicolon|tab|space|pipe|\\t|."
_SEPARATOR = "comma, semicolon, tab, space, pipe, or one character"
FieldSeparator = Annotated[
    str | None,
    Option("between the columns of a table of labels (default: found)", "data", pattern=_ONE, allowed=_SEPARATOR),
]
LabelSeparator = Annotated[
    str | None,
    Option("between the labels of an image in a table (default: found)", "data", pattern=_ONE, allowed=_SEPARATOR),
]


def range_texts(value: Any) -> Any:
    """Return the ends of ``--value-range`` as text, whatever numbers they were."""
    if isinstance(value, (list, tuple)):
        return tuple(item if isinstance(item, str) else f"{item:.17g}" if isinstance(item, float) else str(item)
                     for item in value)  # fmt: skip
    return value


@dataclass(frozen=True, kw_only=True)
class ImageOptions(Config):
    """What the audit of the folder does with what it finds."""

    GROUP: ClassVar[str] = "data"

    on_bad_image: Annotated[
        Literal["skip", "fail"], Option("unreadable files: skip and count them, or fail before training")
    ] = "skip"
    on_leak: Annotated[
        Literal["warn", "fail"],
        Option("held-out images that are in the training part, too, byte for byte: warn, or fail before training"),
    ] = "warn"
    field_separator: FieldSeparator = None
    keep_empty_classes: Annotated[bool, Option("keep classes that have no images")] = False
    max_pixels: Annotated[
        int, Option("largest image, width × height; larger ones count as bad; kept in the pack", least=1)
    ] = 178_956_970
    value_range: Annotated[
        tuple[str, ...],
        Option(
            "values that become 0 and 255 in images of more than 8 bits: two numbers, or percentiles (p1 p99)",
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
    """How a folder is read, and the page that shows what is in it.

    Raises:
        UsageError: a value is out of range, or two values contradict each other.
    """

    out: _Page = None
    multi_label: MultiLabel = False
    label_separator: LabelSeparator = None
    val_split: ValSplit = 0.2
    seed: Seed = 0
    workers: Workers = None
    cache: Annotated[bool, Option("remember what was decoded", "running", off="decode again, and remember nothing")] = (
        True
    )
    overwrite: Overwrite = False

    def check(self) -> None:
        """Refuse options that contradict each other."""
        if self.multi_label and self.keep_empty_classes:
            raise UsageError("`--keep-empty-classes` is of one label an image; with --multi-label leave it out")
        if self.label_separator is not None and not self.multi_label:
            raise UsageError("`--label-separator` is of several labels an image; give --multi-label, or leave it out")


@dataclass(frozen=True, kw_only=True)
class AuditCommand(AuditConfig):
    """``vtk data audit``: what to look at, and how."""

    data: Folder
