"""Images and loss that a result is of, in words, and whether a paper's figures may stand beside it."""

from typing import Any

from vtk.analysis.diagnostics.base import Result


def measurement(result: Result) -> dict[str, Any]:
    """Return the images and the loss of a result; empty for one of version 0.1, which does not say."""
    return dict(result.get("measurement") or {})


def on_images(result: Result) -> str:
    """Return which images a number is of, as the end of its name: numbers of others are in another row."""
    kind = measurement(result).get("images")
    return "" if kind is None else f", {kind} images"


def sentence(result: Result) -> str:
    """Return how a result was measured."""
    of = measurement(result)
    if not of:
        return "The result does not say on which images it was measured; version 0.1 took held-out ones by default."
    words = [f"{of['images']} images"]
    if of.get("loss_images") == "augmented":
        words.append("augmented as in training")
    if of.get("weight_decay"):
        words.append(f"with the l2 term of weight decay {of['weight_decay']:g}")
    return f"Measured on {', '.join(words)}."


def as_chen(result: Result) -> bool:
    """Return whether the images and the loss are those of Chen et al. (2022).

    They measure on training images, without augmentation, the cross-entropy without an l2 term (Table 1, Appendices E.1
    and F). On held-out images a model that fits its training images has a far larger curvature: 1,292 where it has 180.
    """
    of = measurement(result)
    return (
        of.get("images") == "training"
        and of.get("loss") == "cross-entropy"
        and of.get("loss_images") == "plain"
        and not of.get("weight_decay")
    )


def not_as_chen(result: Result) -> str:
    """Return why figures of Chen et al. (2022) do not stand beside a result."""
    of_chen = measurement(result).get("protocol") == "chen"
    end = "." if of_chen else ": `vtk analyze … --protocol chen` measures as they do."
    return (
        "Figures of Chen et al. (2022) are of the plain cross-entropy on training images and are not compared with "
        f"this one{end}"
    )
