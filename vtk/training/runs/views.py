"""Chooses mirroring, describes augmentation in one line, and warns of images that are upscaled."""

from vtk import console
from vtk.card import InputSpec
from vtk.data.audit.result import DataAudit
from vtk.data.mirroring import Mirroring, choose_mirroring

_LARGE = 4.0  # times that a side is enlarged before it is worth a warning


def resolve_mirroring(hflip: float | None, before: object, audit: DataAudit, in_chans: int) -> Mirroring:
    """Return the probability of mirroring, and the reason where images are not mirrored.

    Args:
        hflip: value of ``--hflip``.
        before: probability in the run that is resumed; not a number where there is none.
        audit: of the images.
        in_chans: of the model.
    """
    for value in (hflip, before):
        if isinstance(value, (int, float)):
            return Mirroring(float(value), "")
    return choose_mirroring(audit, in_chans)


def describe_views(config: object, mirroring: Mirroring, *, hint: bool = True) -> str:
    """Return a line that describes the augmentation of training images.

    Args:
        config: of a run; options that it lacks count as off.
        mirroring: probability, and why it was chosen.
        hint: name the flag that overrides the choice.
    """
    low, high = getattr(config, "crop_scale", (1.0, 1.0))
    steps = [f"cropped at random to {100 * low:g}–{100 * high:g} % of the area"]
    if pad := getattr(config, "crop_pad", 0):
        steps = [f"cropped at random within a border of {pad} px"]
    if mirroring.probability:
        steps.append(f"mirrored with probability {mirroring.probability:g}")
    else:
        why = f", since {mirroring.why}" + " (--hflip 0.5 mirrors)" * hint if mirroring.why else ""
        steps.append(f"not mirrored{why}")
    if policy := getattr(config, "auto_augment", None):
        steps.append(f"augmented by {policy}")
    # timm's policies but 3-Augment leave it out
    if (jitter := getattr(config, "color_jitter", None)) and (not policy or "3a" in policy):
        steps.append(f"colours changed by up to {100 * jitter:g} %")
    if reprob := getattr(config, "reprob", 0.0):
        steps.append(f"a rectangle erased with probability {reprob:g}")
    mixes = [f"{name} {value:g}" for name in ("mixup", "cutmix") if (value := getattr(config, name, 0.0))]
    if mixes:
        steps.append(f"mixed ({' and '.join(mixes)}, in {100 * getattr(config, 'mix_prob', 1.0):g} % of the batches)")
    if smoothing := getattr(config, "smoothing", 0.0):
        steps.append(f"labels smoothed by {smoothing:g}")
    return f"training images are {', '.join(steps)}"


def warn_of_enlarging(audit: DataAudit, spec: InputSpec, patch: int, title: str = "") -> None:
    """Warn of images much smaller than the input: upscaling costs memory and time, and adds no detail.

    Args:
        audit: of the images.
        spec: of the model's input.
        patch: pixels of a patch's side; 0 where there are none.
        title: put before it.
    """
    if not audit.sizes:
        return
    height, width = audit.sizes["median_height"], audit.sizes["median_width"]
    by = max(spec.height / height, spec.width / width)
    if by < _LARGE:
        return
    patches = f", {spec.height // patch * (spec.width // patch):,} patches an image" if patch else ""
    step = patch or 32
    # twice the images' own size, on whole patches: more shows nothing, less has few patches
    size = max(2 * max(height, width) // step, 2) * step
    smaller = ""
    if size < min(spec.size):
        share = spec.height * spec.width / size**2
        smaller = f"; --img-size {size} takes 1/{share:.0f} of the pixels, and about 1/{share:.0f} of the memory"
    console.warn(
        f"{title}images of {height}×{width} px (median) are enlarged {by:.0f} times a side to {spec.height}×"
        f"{spec.width} px{patches}{smaller}"
    )
