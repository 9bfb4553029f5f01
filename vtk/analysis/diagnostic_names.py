"""Names of the diagnostics, in the order of the report; imports no torch."""

GROUPS: dict[str, tuple[str, ...]] = {
    "attention": ("entropy", "distance", "overlays", "rollout", "cb-scales"),
    "features": ("fourier", "variance", "cka", "lesion"),
    "tokens": ("similarity", "neurons", "norms"),
    "loss": ("hessian", "hessian-blocks", "ntk", "flatness", "miss-rate", "landscape"),
    "robustness": ("calibration", "frequency-noise", "corruptions", "noise", "occlusion", "attacks"),
}
"""Groups of diagnostics, for ``--what``."""

NAMES: tuple[str, ...] = tuple(name for names in GROUPS.values() for name in names)
"""Every diagnostic's name."""

CORRUPTIONS: tuple[str, ...] = (
    "gaussian-noise", "shot-noise", "impulse-noise", "defocus-blur", "motion-blur", "zoom-blur", "snow", "fog",
    "brightness", "contrast", "elastic", "pixelate", "jpeg",
)  # fmt: skip
"""Kinds of corruption, for ``--corruptions``."""
