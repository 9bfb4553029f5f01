"""Corrected versions of steps of timm's pipelines that fail in edge cases."""

from typing import Any

from PIL import Image, ImageOps
from timm.data import auto_augment as auto_augment_ops
from timm.data.transforms import RandomResizedCropAndInterpolation, str_to_pil_interp

from vtk.card import InputSpec


class FitInside:
    """timm's ResizeKeepRatio on the longer side, with at least one pixel of width for very thin images."""

    def __init__(self, spec: InputSpec) -> None:
        self.size, self.resample = spec.size, str_to_pil_interp(spec.interpolation)

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return the resized image."""
        scale = min(self.size[0] / image.height, self.size[1] / image.width)
        return image.resize(
            (max(round(image.width * scale), 1), max(round(image.height * scale), 1)), resample=self.resample
        )


class WholePixels(RandomResizedCropAndInterpolation):  # type: ignore[misc]
    """timm's random crop, with at least one pixel for tiny images."""

    def __init__(self, crop: Any, spec: InputSpec) -> None:
        super().__init__(crop.size, crop.scale, crop.ratio, spec.interpolation)

    @staticmethod
    def get_params(img: Image.Image, scale: Any, ratio: Any) -> tuple[int, int, int, int]:
        """Return top, left, height and width of a crop."""
        top, left, height, width = RandomResizedCropAndInterpolation.get_params(img, scale, ratio)
        return min(top, img.height - 1), min(left, img.width - 1), max(height, 1), max(width, 1)


def fix_crops(steps: list[Any], spec: InputSpec) -> list[Any]:
    """Return ``steps`` with `WholePixels` in place of random crops."""
    return [WholePixels(step, spec) if isinstance(step, RandomResizedCropAndInterpolation) else step for step in steps]


def fix_posterize(steps: list[Any]) -> None:
    """Limit posterize to at least one bit: timm requests 0 bits at full strength, which newer Pillow refuses."""
    for step in steps:
        policies = [getattr(step, "ops", None) or [], *(getattr(step, "policy", None) or [])]
        for op in (op for ops in policies for op in ops):
            if op.aug_fn is auto_augment_ops.posterize:
                op.aug_fn = _posterize


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    return image if bits >= 8 else ImageOps.posterize(image, max(bits, 1))
