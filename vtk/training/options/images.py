"""Which image files are used, and which channels of them."""

from dataclasses import dataclass, field
from typing import Literal

from vtk.training.options.checks import require


@dataclass(frozen=True)
class ImageOptions:
    """What the audit of the folder does with what it finds."""

    on_bad_image: Literal["skip", "fail"] = field(
        default="skip",
        metadata={"help": "files that cannot be read: skip and count them, or fail before anything is trained"},
    )
    keep_empty_classes: bool = field(
        default=False, metadata={"help": "make classes of folders without images, too, so that their labels exist"}
    )
    max_pixels: int = field(
        default=178_956_970,
        metadata={"help": "largest image, width × height; larger ones count as bad, and the pack remembers the limit"},
    )
    in_chans: int = field(
        default=3,
        metadata={
            "help": "channels of the input: 1 grey, 2 grey and opacity, 3 RGB, 4 RGB and opacity, or any number that "
            "the pages of the TIFF files have together; other than 3 adapts the stem"
        },
    )

    def _check_images(self) -> None:
        require(self.on_bad_image in ("skip", "fail"), "on_bad_image", self.on_bad_image, "skip or fail")
        require(self.max_pixels >= 1, "max_pixels", self.max_pixels, "at least 1")
        require(1 <= self.in_chans <= 1024, "in_chans", self.in_chans, "1 to 1024")
