"""Writes the model card (README.md) of a pack on the Hugging Face hub, from `vtk.card.Card`.

A card is untrusted text: class names may hold anything a folder's name can. So the front matter is written by a YAML
library, and every value in the page is a Markdown code span or stands in a code block, where nothing is markup.
"""

import dataclasses
import math
import re
import shlex
from pathlib import PureWindowsPath
from typing import Any

import timm
import yaml

from vtk.card import BaseRef, Card
from vtk.console import percent, size
from vtk.evaluation import choice
from vtk.markdown import block, span
from vtk.packs.factor_facts import drop_of, ranks_of
from vtk.packs.folder_readme import timm_code, transformers_code
from vtk.packs.merged_folder import Form
from vtk.packs.readme import answer, class_list, preprocessing
from vtk.text import printable

LIBRARY = "vit-toolkit"
_WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".npz")
_REPO = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
# where a word, or a part of it behind =, : and the like, is an absolute path, one above this folder, or a home
_PRIVATE = re.compile(r"(?:^|(?<=[\s=,:;@'\"(\[]))(?:(?:file:|[A-Za-z]:|~[^/\\]*|\.\.)?[/\\]|(?:~\w*|\.\.)$).*", re.S)
_SIZE = re.compile(r"@\d+(?:x\d+)?$")


def public_card(card: Card) -> Card:
    """Return a card without private paths: of files of weights the name is kept, other paths are removed.

    Class names are part of the model and stay as they are.
    """
    values = {f.name: getattr(card, f.name) for f in dataclasses.fields(card)}
    for name in ("metrics", "data", "versions", "pack"):
        values[name] = _public(values[name])
    values["command"] = public_command(card.command)
    if card.base is not None and not card.base.source.startswith(("hub:", "random:")):
        values["base"] = BaseRef(PureWindowsPath(card.base.source).name, card.base.id)
    return Card(**values)


def public_command(command: str) -> str:
    """Return a command line with ``PATH`` for each private path; an empty string if it cannot be parsed.

    Relative paths such as ``data/pets`` stay, and so do the names of files of weights.
    """
    try:
        return shlex.join(_public_word(word) for word in shlex.split(command))
    except ValueError:  # an open quote: no way to tell where a path ends
        return ""


def base_model(card: Card) -> str | None:
    """Return the hub's id of the base weights; None if they are not from the hub."""
    if card.base is None or not card.base.source.startswith("hub:"):
        return None
    name = card.base.source.removeprefix("hub:")
    if name.startswith(("hf-hub:", "hf_hub:")):
        found: str | None = name[len("hf-hub:") :].partition("@")[0]
    else:
        try:
            config = timm.get_pretrained_cfg(name)
        except RuntimeError:  # the model has no weights of that tag
            config = None
        found = None if config is None else config.hf_hub_id
    return found if found and _REPO.fullmatch(found) else None


def front_matter(card: Card, name: str, license: str | None = None, form: Form | None = None) -> dict[str, Any]:
    """Return the metadata block that the hub reads.

    Args:
        card: of the pack.
        name: of the model, shown with its results.
        license: license identifier of the hub; there is no default, since the owner chooses it.
        form: of the merged model beside the pack, which its library loads from the hub.
    """
    library = LIBRARY if form is None else "transformers" if form.native else "timm"
    data: dict[str, Any] = {
        "library_name": library,
        "pipeline_tag": "image-classification",
        "tags": [LIBRARY, "timm", "vision-transformer", "task-pack"],
    }
    if license is not None:
        data["license"] = license
    if (base := base_model(card)) is not None:
        data["base_model"] = base
    if results := [
        {"type": kind, "name": text, "value": value}
        for key, kind, text in (("top1", "accuracy", "top-1 accuracy"), ("top5", "top_5_accuracy", "top-5 accuracy"))
        if (value := _number(card.metrics.get(key))) is not None
    ]:
        # which images they were is known to the owner only; the hub wants some name for them
        held_out = {"name": "held-out images", "type": "imagefolder"}
        entry = {"task": {"type": "image-classification"}, "dataset": held_out, "metrics": results}
        data["model-index"] = [{"name": name, "results": [entry]}]
    return data


def readme(
    card: Card, repo_id: str, *, tensors_bytes: int, base_bytes: int | None, revision: str | None = None,
    license: str | None = None, form: Form | None = None,
) -> str:  # fmt: skip
    """Return the page.

    Args:
        card: as it is uploaded (`public_card`).
        repo_id: ``USER/NAME``.
        tensors_bytes: of ``task.safetensors``.
        base_bytes: of ``base.safetensors``; None where it is not part of the upload.
        revision: the branch that it goes to, if not the main one.
        license: see `front_matter`.
        form: see `front_matter`.
    """
    assert card.base is not None
    name = repo_id.rpartition("/")[2]
    local = f"tasks/{name}"
    head = yaml.safe_dump(front_matter(card, name, license, form), sort_keys=False, allow_unicode=True, width=10**6)
    where = f" --revision {shlex.quote(revision)}" if revision else ""
    source = card.base.source
    if base_bytes is not None:
        place = f"The base tensors it needs are here too ({size(base_bytes)}), so nothing else is needed."
    elif source.startswith("hub:"):
        place = f"The base weights are not included: they are timm's {span(source[4:])}, downloaded on first use."
    else:
        place = (
            f"The base weights are not included: they were {span(source)}; any file with the same values works "
            "(`--base FILE`)."
        )
    facts = [
        f"model: {span(card.model.name)}" + (f" with {span(card.model.kwargs)}" if card.model.kwargs else ""),
        *(f"transform: {span(t.op)} {span(t.args)}" for t in card.transforms),
        f"base: {span(card.base.source)}, id {span(card.base.id)}",
    ]
    ranks = ranks_of(card, "the card")
    stored = "the tensors of a Vision Transformer that training changed"
    if ranks is not None:
        stored += f", {ranks.matrices} matrices of them as low-rank factors"
        facts.append(f"factors: {ranks.matrices} matrices, rank {ranks}, in {span(card.pack['dtype'])}")
    parts = [
        f"---\n{head}---\n\n# {name}\n",
        f"A task pack of {LIBRARY}: {stored} ({size(tensors_bytes)}), a description of the model (`task.json`) and a "
        f"hash of each tensor of its base. {place}\n",
        f"## Use\n\n{block(f'vtk tasks pull {repo_id}{where} --out {local}', 'sh')}\n"
        f"Then `vtk eval {local} FOLDER` evaluates it, `vtk predict {local} IMAGES` labels images, and in Python:\n\n"
        + block(f'from vtk.packs import load_task\n\nmodel = load_task("{local}").model  # plain timm', "python"),
        *_library_code(card, repo_id, revision, form),
        "## Model\n\n" + "".join(f"- {fact}\n" for fact in facts),
        preprocessing(card.input),
        answer(card),
    ]
    if metrics := _metrics(card):
        parts.append(f"## Metrics\n\nMeasured on held-out images.\n\n{metrics}")
    parts.append(class_list(card.classes))
    made = block(printable(card.command), "sh") + "\n" if card.command else ""
    versions = ", ".join(f"{k} {v}" for k, v in card.versions.items())
    if made or versions:
        parts.append(f"## How it was made\n\n{made}" + (f"With {span(versions)}.\n" if versions else ""))
    return "\n".join(parts)


def _library_code(card: Card, repo_id: str, revision: str | None, form: Form | None) -> list[str]:
    """Return the sections that load the merged model beside the pack."""
    if form is None:
        return []
    sections = [f"## With transformers\n\n{transformers_code(card, repo_id, revision)}"]
    if not form.native:
        at = f"@{revision}" if revision else ""
        sections.insert(0, f"## With timm\n\n{timm_code(card, f'hf-hub:{repo_id}{at}')}")
    return sections


def _metrics(card: Card) -> str:
    names = {key: text for key, text in choice.names(card.multi_label).items() if key != "loss"}
    lines = [
        f"- {text}: {percent(v)}\n" for k, text in names.items() if (v := _number(card.metrics.get(k))) is not None
    ]
    for key, text in (("loss", "binary cross-entropy" if card.multi_label else "cross-entropy"), ("count", "images")):
        if (value := _number(card.metrics.get(key))) is not None:
            lines.append(f"- {text}: {value:g}\n")
    if (drop := drop_of(card)) is not None:
        lines.append(f"- lost by compression: {100 * drop:.2f} points\n")
    regime = card.regime
    if lines:
        lines.append(
            f"- measured in {span(regime.precision)}, {regime.batch_size} images a batch, {span(regime.device)}\n"
        )
    return "".join(lines)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_public(item) for item in value]
    return _public_word(value) if isinstance(value, str) else value


def _public_word(word: str) -> str:
    found = _PRIVATE.search(word)
    if found is None:
        return word
    image_size = _SIZE.search(word)
    end = image_size.start() if image_size else len(word)
    name = PureWindowsPath(word[found.start() : end]).name  # knows both kinds of slashes
    return word[: found.start()] + (name if name.endswith(_WEIGHTS) else "PATH") + word[end:]
