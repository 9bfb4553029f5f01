"""Protocols of the papers: the images, loss and iteration of each diagnostic, and where the paper says so."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

Split = Literal["val", "train", "all"]
CURVATURE = ("hessian", "hessian-blocks", "ntk")
"""Diagnostics that take ``--hessian-images``."""

TRAINING = ("neurons", "norms", "hessian", "hessian-blocks", "ntk", "flatness", "miss-rate", "landscape")
"""Diagnostics that are defined on training images, which is their default."""


@dataclass(frozen=True)
class Settings:
    """How one diagnostic is measured; the fields but ``share`` are options of `AnalyzeConfig`.

    Attributes:
        split: part of the images.
        share: fraction of that part that is used, in place of ``max_images`` and ``hessian_images``; None for those.
        max_images: of all diagnostics.
        hessian_images: None for all that are loaded.
        hessian_batch: images per mini-batch.
        hessian_method: iteration.
        hessian_iterations: products at most; with ``power`` of each value.
        hessian_tol: relative tolerance.
        top: eigenvalues per mini-batch.
        loss_images: plain or augmented.
        weight_decay: of the l2 term in the loss.
        grid: points along each axis of the landscape.
        directions: how the landscape's directions are normalised.
        perturb_vectors: whether the landscape moves 1-D tensors.
        draws: of noise on the weights.
        epsilons: radii of attacks, in 1/255.
        ntk_relu: ReLU in place of GELU.
        ntk_init: the kernel of the initial weights, not the given ones.
        lesion_convs: single convolutions are removed, not blocks of them.
    """

    split: Split = "val"
    share: float | None = None
    max_images: int = 512
    hessian_images: int | None = 64
    hessian_batch: int = 16
    hessian_method: Literal["lanczos", "power"] = "lanczos"
    hessian_iterations: int = 100
    hessian_tol: float = 1e-3
    top: int = 5
    loss_images: Literal["plain", "augmented"] = "plain"
    weight_decay: float = 0.0
    grid: int = 11
    directions: Literal["filter", "reference"] = "filter"
    perturb_vectors: bool = False
    draws: int = 20
    epsilons: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    ntk_relu: bool = False
    ntk_init: bool = False
    lesion_convs: bool = False

    def limit(self, part: int) -> int:
        """Return how many of a part's images are loaded."""
        return min(part, self.max_images if self.share is None else max(round(self.share * part), 1))


OPTIONS = tuple(f.name for f in fields(Settings) if f.name != "share")
"""Options that a protocol sets; an explicit one overrides it."""


@dataclass(frozen=True)
class Protocol:
    """How a paper measures its quantities.

    Attributes:
        paper: author and year.
        settings: of each diagnostic that follows the paper, its options; what the paper leaves open is not among them.
        sources: of these diagnostics, where the paper states its settings.
    """

    paper: str
    settings: Mapping[str, Mapping[str, Any]]
    sources: Mapping[str, str] = field(default_factory=dict)


_HELD_OUT: Mapping[str, Any] = {"split": "val"}
_TEST: Mapping[str, Any] = {"split": "val", "share": 1.0}
_TENTH: Mapping[str, Any] = {"split": "train", "share": 0.1}
_PLAIN: Mapping[str, Any] = {"loss_images": "plain", "weight_decay": 0.0}
_REGULARISED: Mapping[str, Any] = {"loss_images": "augmented", "weight_decay": 0.05}

PROTOCOLS: Mapping[str, Protocol] = {
    "park-kim": Protocol(
        "Park and Kim 2022",
        {
            "fourier": _TEST, "variance": _TEST, "cka": _HELD_OUT, "lesion": {**_HELD_OUT, "lesion_convs": True},
            "hessian": {
                **_TENTH, **_REGULARISED, "hessian_batch": 16, "top": 5, "hessian_method": "power",
                "hessian_iterations": 100, "hessian_tol": 1e-3,
            },
            "landscape": {
                "split": "train", **_REGULARISED, "directions": "reference", "perturb_vectors": False, "grid": 21,
            },
            "calibration": _HELD_OUT, "frequency-noise": _HELD_OUT,
        },
        {
            "fourier": "A.1: the entire test set", "variance": "A.1: the entire test set",
            "lesion": "Figure 10b: one 3×3 convolution of a bottleneck, one MSA or one MLP",
            "hessian": "A.1: a tenth of the training set, augmented, batch 16, top 5, power iteration, l2 term of "
                       "weight decay 0.05; iterations and tolerance of PyHessian",
            "landscape": "A.2: augmented training set with the l2 term; grid and normalisation of the official code",
        },
    ),
    "chen": Protocol(
        "Chen et al. 2022",
        {
            "overlays": _HELD_OUT,
            "neurons": _TENTH, "norms": {"split": "train"},
            "hessian-blocks": {
                **_TENTH, **_PLAIN, "hessian_method": "power", "hessian_iterations": 100, "hessian_tol": 1e-6,
            },
            "ntk": {**_TENTH, "ntk_relu": True, "ntk_init": True},
            "flatness": {"split": "train", **_PLAIN, "draws": 1000},
            "miss-rate": {"split": "train"},
            "landscape": {**_TENTH, **_PLAIN, "directions": "filter", "perturb_vectors": False, "grid": 51},
            "corruptions": _HELD_OUT, "attacks": {"split": "val", "epsilons": (2.0,)},
        },
        {
            "neurons": "section 4.4: a tenth of the training set",
            "hessian-blocks": "appendix F: a tenth of the training set, 100 power iterations",
            "ntk": "appendix G: at initialisation, ReLU, blocks of 48 × 48",
            "flatness": "Table 1: training loss, 1,000 draws; σ is not stated",
            "miss-rate": "section 4.5: in between training images",
            "landscape": "appendix E.1: a tenth of the training set, cross-entropy, filter normalisation, 2,500 points",
            "attacks": "appendix B: PGD of ten steps of 0.25/255 within 2/255",
        },
    ),
    "hyeon-woo": Protocol(
        "Hyeon-Woo et al. 2023",
        {
            "entropy": _HELD_OUT, "distance": _HELD_OUT, "cb-scales": _HELD_OUT, "noise": _HELD_OUT,
            "occlusion": _TEST, "attacks": _HELD_OUT,
        },
        {"occlusion": "section 4.6: every validation image",
         "distance": "section 3.2: L1 norm of normalised coordinates (the relative distance)"},
    ),
    "wang": Protocol(
        "Wang et al. 2022", {"similarity": _HELD_OUT},
        {"similarity": "equation 5; stem and position embedding count as layers"},
    ),
}  # fmt: skip
"""Protocols by the value of ``--protocol``."""

NAMES = ("park-kim", "chen", "hyeon-woo", "wang")


def settings_of(config: object, name: str) -> Settings:
    """Return how a diagnostic is measured: explicit options, else the protocol's, else the defaults.

    Args:
        config: an `vtk.AnalyzeConfig`, whose options are None where they are not given.
        name: of the diagnostic.
    """
    chosen = getattr(config, "protocol", None)
    of_paper = dict(PROTOCOLS[chosen].settings.get(name, {})) if chosen else {}
    explicit = {o: value for o in OPTIONS if (value := getattr(config, o, None)) is not None}
    base: dict[str, Any] = {"split": "train" if name in TRAINING else "val"}
    if name == "hessian-blocks":
        base["hessian_tol"] = 1e-2  # bars are compared by eye, for which half as many products are enough
    if "share" in of_paper:
        base["hessian_images"] = None
    if name in CURVATURE and "hessian_images" in explicit:
        base["max_images"] = max(Settings.max_images, explicit["hessian_images"])
        of_paper.pop("share", None)
    if "max_images" in explicit:
        of_paper.pop("share", None)
    return Settings(**{**base, **of_paper, **explicit})


def describe(config: object, name: str) -> str:
    """Return the settings that the config's protocol gives a diagnostic, in words, and what explicit options change."""
    one, now = PROTOCOLS[getattr(config, "protocol", "")], settings_of(config, name)
    wanted = {o: value for o, value in one.settings.get(name, {}).items() if o != "share"}
    changed = [o for o, value in wanted.items() if getattr(now, o) != value]
    words = [f"{o.replace('_', '-')} {_plain(getattr(now, o))}" for o in wanted]
    if now.share is not None:
        words.insert(1, f"{100 * now.share:g} % of its images")
    elif "share" in one.settings.get(name, {}):
        most = now.hessian_images if name in CURVATURE else None
        words.insert(1, f"at most {now.max_images if most is None else min(most, now.max_images)} images")
        changed += [o for o in ("max_images", "hessian_images") if getattr(config, o) is not None]
    text = f"{name}: {', '.join(words)}" if name in one.settings else f"{name}: not in the paper; default settings"
    if source := one.sources.get(name):
        text += f" ({source})"
    if changed:
        given = ", ".join(f"--{o.replace('_', '-')}" for o in changed)
        text += f"; {given} given, unlike the paper's"
    return text


def _plain(value: object) -> str:
    return ",".join(f"{item:g}" for item in value) if isinstance(value, tuple) else str(value)
