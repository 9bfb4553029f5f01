"""Writes README sections of an exported model from its card: preprocessing, outputs and the list of classes.

The sections say everything that a program without this toolkit needs. A card is untrusted text: its values stand in
code spans and code blocks (`vtk.markdown`).
"""

import math
import re
import sys
from collections.abc import Mapping
from types import MappingProxyType

from vtk.card import Card, InputSpec
from vtk.evaluation.abstention import describe
from vtk.markdown import block, quoted, span

NO_NAMES: Mapping[str, str] = MappingProxyType({})

FOLDED = 100
"""Number of classes above which the list is collapsed."""

_COLOURS = {
    1: "1 channel, the luminance of the image",
    2: "2 channels, luminance and alpha",
    3: "3 channels, RGB",
    4: "4 channels, RGB and alpha",
}


def code_block(*parts: str) -> str:
    """Return Python lines as one code block, what they import at its top."""
    lines = [line for part in parts for line in [*part.split("\n"), "", ""]]
    imports = sorted({line for line in lines if line.startswith(("import ", "from "))},
                     key=lambda line: (_is_foreign(line), line.startswith("from "), line))  # fmt: skip
    rest = "\n".join(line for line in lines if line not in imports).strip("\n")
    own, foreign = ("\n".join(i for i in imports if _is_foreign(i) == kind) for kind in (False, True))
    head = "\n\n".join(filter(None, (own, foreign)))
    return block(re.sub("\n{4,}", "\n\n\n", f"{head}\n\n{rest}"), "python")


def _is_foreign(line: str) -> bool:
    return line.split()[1].partition(".")[0] not in sys.stdlib_module_names


def card_sections(
    card: Card, *, in_graph: bool = False, outputs: tuple[str, ...] = ("logits",), called: Mapping[str, str] = NO_NAMES
) -> str:
    """Return the sections that every artefact's page ends with.

    Args:
        card: of the model.
        in_graph: the model resizes and normalises by itself, and takes raw images.
        outputs: what it gives, as this toolkit calls it.
        called: names of outputs in the file that differ from these.
    """
    parts = [preprocessing(card.input, in_graph=in_graph), answer(card, outputs, called), class_list(card.classes)]
    return "\n".join(parts)


def shares_code(cards: Mapping[str, Card], *, name: str = "logits", test: str = "") -> str:
    """Return the Python expression that makes probabilities of ``values``, a task's outputs of one image.

    Args:
        cards: by the tasks' names; ``task`` is defined where they differ.
        name: of the output.
        test: Python expression that says of ``task`` whether it is multi-label, by default whether it is one of those.
    """
    several = [task for task, card in cards.items() if card.multi_label]
    sigmoid = "1 / (1 + np.exp(-values))"
    heats = {task: card.temperature for task, card in cards.items() if card.temperature != 1}
    shifted = "values - values.max()"
    if heats:
        heat = f"{next(iter(heats.values()))!r}" if len(cards) == 1 else f"{heats!r}.get(task, 1)"
        shifted = f"({shifted}) / {heat}"
    softmax = f"np.exp({shifted}) / np.exp({shifted}).sum()"
    if name == "probabilities":
        return "values"
    if several and len(several) < len(cards):
        return f"{sigmoid} if {test or f'task in {several}'} else {softmax}"
    return f"{sigmoid}  # each class is a decision of its own: given from 0.5 on" if several else softmax


def classify_code(card: Card, run: str, *, name: str = "logits") -> str:
    """Return the definition of ``classify(path)`` for a page's code: an image's classes and their shares, best first.

    Args:
        card: of the model.
        run: Python expression for the output of one image, (classes,), as NumPy array; ``prepare(path)`` is defined,
            and so are ``classes``.
        name: of that output.
    """
    return f"""def classify(path):  # each class with its probability, the most likely first
    values = {run}
    values = values.astype(np.float64)
    shares = {shares_code({"": card}, name=name)}
    return sorted(zip(classes, shares.tolist()), key=lambda pair: -pair[1])"""


def preprocessing(spec: InputSpec, *, in_graph: bool = False) -> str:
    """Return the section that says how an image file becomes the model's input, with all numbers."""
    who = "The model does this itself with the raw images" if in_graph else "In this order"
    lines = [
        f"input: {spec.height} × {spec.width} pixels (height × width), {channels(spec)}",
        *_decoding(spec),
        f"resize: {_resize(spec)}",
        f"interpolation: {spec.interpolation}, as Pillow does it (with antialiasing), on 8-bit values",
        f"values: divided by 255, minus mean {span(list(spec.mean))}, divided by std {span(list(spec.std))}, "
        f"for each channel",
    ]
    return f"## Preprocessing\n\n{who}:\n\n" + "".join(f"- {line}\n" for line in lines)


def answer(card: Card, outputs: tuple[str, ...] = ("logits",), called: Mapping[str, str] = NO_NAMES) -> str:
    """Return the section that says what the outputs mean; ``called`` as of `card_sections`."""
    count = len(card.classes)
    each = f"one for each of the {count} classes, in the order below"
    lines = []
    for name in outputs:
        shown = span(called.get(name, name))
        if name == "features":
            lines.append(f"{shown}: the input of the classifier, pooled over the image")
        elif name == "probabilities":
            lines.append(f"{shown}: {each}; they sum to 1" + _temperature(card))
        elif name == "unknown":
            assert card.threshold is not None
            lines.append(f"{shown}: true where the largest of the calibrated probabilities is below "
                         f"{card.threshold.score:.6g}: {describe(card.threshold)}")  # fmt: skip
        elif card.multi_label:
            lines.append(
                f"{shown}: {each}. An image may have any number of the classes: the sigmoid of each logit is its "
                "probability, and a label is predicted from 0.5 on (a logit of 0)"
            )
        else:
            lines.append(
                f"{shown}: {each}. The predicted class is the largest logit; their softmax gives probabilities"
                + _temperature(card)
            )
    return "## Output\n\n" + "".join(f"- {line}\n" for line in lines)


def _temperature(card: Card) -> str:
    """Return how the probabilities are calibrated; empty where they are not."""
    if card.temperature == 1:
        return ""
    return f" (calibrated: the logits are divided by the temperature {card.temperature:.6g} before the softmax)"


def class_list(classes: tuple[str, ...]) -> str:
    """Return the section with the index and the name, a JSON string, of every class."""
    table = block("\n".join(f"{i} {quoted(name)}" for i, name in enumerate(classes)))
    if len(classes) > FOLDED:
        table = f"<details><summary>Show all {len(classes)}</summary>\n\n{table}\n</details>\n"
    return f"## {len(classes)} classes\n\nIndex and name, as a JSON string.\n\n{table}"


def channels(spec: InputSpec) -> str:
    """Return what the channels are."""
    return _COLOURS.get(spec.in_chans, f"{spec.in_chans} channels, bands in the order of the training files")


def _decoding(spec: InputSpec) -> list[str]:
    lines = ["decoding: the first image of the file, rotated upright by its EXIF orientation"]
    if spec.in_chans in (1, 3):
        lines[0] += ", in 8 bits RGB, transparent pixels on white"
    else:
        lines[0] += ", each channel an 8-bit grey image that is resized on its own"
    if spec.decoding == "srgb":
        lines.append("colours: an embedded colour profile (ICC) is converted to sRGB, relative colorimetric with black "
                     "point compensation")  # fmt: skip
    else:
        lines.append("colours: embedded colour profiles are ignored")
    if spec.value_range:
        lines.append(
            f"value range: {spec.describe_range()}, rounded to integers and clipped at both ends; NaN becomes 0; "
            "8-bit images are used as they are"
        )
    else:
        lines.append("value range: 0 to 255; grey images of 16 bits are divided by 257")
    return lines


def _resize(spec: InputSpec) -> str:
    high, wide = spec.height, spec.width
    if spec.resize_mode == "squash":
        return f"to {high} × {wide}, without keeping proportions (`squash`)"
    if spec.resize_mode == "pad":
        fill = [round(255 * value) for value in spec.mean]
        return f"to fit into {high} × {wide}, proportions kept, the rest filled with {fill} on both sides (`pad`)"
    cover = [math.floor(side / spec.crop_pct) for side in spec.size]
    return (
        f"to cover {cover[0]} × {cover[1]}, proportions kept, then the centre of {high} × {wide} is cut out (`crop`, "
        f"crop_pct {spec.crop_pct:g})"
    )
