"""Writes the README.md of a model in a repository: inputs, outputs, and a client that needs tritonclient alone."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vtk.card import Card
from vtk.errors import DataError
from vtk.markdown import span
from vtk.marks import begins
from vtk.packs.readme import card_sections, code_block, shares_code
from vtk_export.readme import README, preparations

TITLE = "# The model "
_IS_OURS = begins(TITLE)
_MODEL_SERVER = """

The config is for Triton's OpenVINO back-end, `ovms.json` for OpenVINO Model Server, which answers the same requests.
Neither server was run with them; the file itself was run with OpenVINO and compared with PyTorch. With the repository
mounted as `/models`: `ovms --config_path /models/{name}/ovms.json --port 8001 --rest_port 8000`."""
_TERMS = ("task", "encoded", "images", "label", "score", "logits", "probabilities", "num_classes")
_READ = """\
def prepare_file(path):  # (1, 1): the bytes of the file; the server decodes it
    with open(path, "rb") as file:
        return np.array([[file.read()]], np.object_)"""


def check_page(folder: Path) -> None:
    """Refuse a folder whose README.md is not from an export, because the whole folder is replaced.

    Raises:
        DataError: says so.
    """
    page = folder / README
    if page.exists() and not _IS_OURS(page):
        raise DataError(f"{page} was not written by `vtk export triton` and would be lost; move it away, or give "
                        "another --name or --out")  # fmt: skip


def model_page(about: Mapping[str, Any], cards: Mapping[str, Card], message: Any, kinds: Mapping[str, str]) -> str:
    """Return the README.md of a model.

    Args:
        about: what ``client.json`` holds.
        cards: of the tasks.
        message: config of the model.
        kinds: of the inputs and outputs, type and shape in words, by their names.
    """
    name, source, outputs, called = about["model"], about["input"], list(about["outputs"]), about.get("names", {})
    batch = about["static_batch"]
    most = message.max_batch_size
    count = f"exactly {batch} images" if batch else f"1 to {most} images" if most else "one or more images"
    given = "".join(
        f"- {kind} {span(entry)}: {kinds[entry]}\n"
        for kind, entries in (("input", message.input), ("output", message.output))
        for entry in (e.name for e in entries)
    )
    parts = [
        f"{TITLE}{span(name)}\n\nA model for Triton Inference Server, exported by vit-toolkit. "
        f"A request has {count}.\n\n"
        f"{given}\n"
        f"{_remarks(about, message)}"
        'After `pip install "tritonclient[http]" numpy pillow`, run these lines in this folder; '
        f"{_use(about, outputs)}:\n\n"
        f"{code_block(*_code(about, cards, outputs))}\n"
        f"`client.py` in this folder does the same for all image formats: `{_client(about, cards)}`."
        f"{_MODEL_SERVER.format(name=name) if message.backend == 'openvino' else ''}"
    ]
    for task, card in cards.items():
        shown = tuple(o for o in outputs if o in ("logits", "probabilities", "features", "unknown")) or ("logits",)
        sections = card_sections(card, in_graph=source != "pixel_values", outputs=shown, called=called)
        if len(cards) > 1:
            sections = f"## Task {span(task)}\n\n" + re.sub("^## ", "### ", sections, flags=re.MULTILINE)
        parts.append(sections)
    return "\n\n".join(parts)


def _use(about: Mapping[str, Any], outputs: Sequence[str]) -> str:
    """Return the clause that says what the last function of the page's code returns."""
    given = '"photo.jpg"' + (f", {next(iter(about['tasks']))!r}" if about["has_task"] else "")
    if "logits" not in outputs and "probabilities" not in outputs:
        return f"{span(f'run({given})')} queries the server at localhost:8000 and returns the outputs for an image"
    return (
        f"{span(f'classify({given})')} queries the server at localhost:8000 and returns the classes with their "
        "probabilities, most likely first"
    )


def _client(about: Mapping[str, Any], cards: Mapping[str, Card]) -> str:
    """Return the command line of the client."""
    return "python client.py photo.jpg" + " --task TASK" * (about["has_task"] and len(cards) > 1)


def _remarks(about: Mapping[str, Any], message: Any) -> str:
    lines = []
    names, called = [entry.name for entry in message.input], about.get("names", {})
    task, encoded, images, label, score, logits, probabilities, count = (called.get(n, n) for n in _TERMS)
    if about["has_task"]:
        if "task_numbers" in about:
            lines.append(f"`{task}` is the number of each image's task, by `task_numbers` of client.json; a request "
                         f"may mix images of several tasks. A number that no task has gives NaN, and 0 as `{count}`. "
                         "Logits beyond a task's own classes are the lowest fp32 number.")  # fmt: skip
        else:
            lines.append(f"`{task}` is the task name of each image; a request may mix images of several tasks.")
    if encoded in names:
        lines.append(f"A request has either `{encoded}`, whole files such as JPEG and PNG, or `{images}`, decoded and "
                     "all of the same size.")  # fmt: skip
    if "label" in about["outputs"]:
        lines.append(f"`{label}` is the most likely class and `{score}` its probability. Columns beyond a task's own "
                     f"classes are padding: the lowest fp32 number in `{logits}`, 0 in `{probabilities}`.")  # fmt: skip
    return "".join(f"{line}\n" for line in lines) + "\n" * bool(lines)


def _code(about: Mapping[str, Any], cards: Mapping[str, Card], outputs: Sequence[str]) -> list[str]:
    source, kind, batch, called = about["input"], about["datatype"], about["static_batch"], about.get("names", {})
    ends = [called.get(name, name) for name in outputs]
    first = next(iter(cards))
    parts = [
        "import json\n\nimport numpy as np\nimport tritonclient.http\n\n"
        'with open("client.json", encoding="utf-8") as file:\n    '
        + (
            'about = json.load(file)\ntasks = about["tasks"]'
            if "task_numbers" in about
            else 'tasks = json.load(file)["tasks"]'
        )
    ]
    parts.append(f"{_READ}\n\n\nprepare = dict.fromkeys(tasks, prepare_file)" if source == "encoded"
                 else preparations(cards, raw=source == "images"))  # fmt: skip
    images = "prepare[task](path)"
    if batch:
        images = f"np.repeat({images}, {batch}, 0)"
    if kind == "FP16" and source == "pixel_values":
        images += ".astype(np.float16)"
    lines = [
        f'def run(path, task={first!r}, url="localhost:8000"):  # the outputs for one image, by name',
        f"    images = {images}",
        f'    inputs = [tritonclient.http.InferInput({called.get(source, source)!r}, list(images.shape), "{kind}")]',
        "    inputs[0].set_data_from_numpy(images)",
    ]
    if about["has_task"]:
        task = called.get("task", "task")
        kind, value = (
            ("INT32", '[[about["task_numbers"][task]]] * len(images), np.int32') if "task_numbers" in about
            else ("BYTES", "[[task.encode()]] * len(images), np.object_")
        )  # fmt: skip
        lines += [
            f'    inputs.append(tritonclient.http.InferInput("{task}", [len(images), 1], "{kind}"))',
            f"    inputs[1].set_data_from_numpy(np.array({value}))",
        ]
    lines += [
        f"    wanted = [tritonclient.http.InferRequestedOutput(name) for name in {ends}]",
        "    with tritonclient.http.InferenceServerClient(url) as server:",
        f"        found = server.infer({about['model']!r}, inputs, outputs=wanted)",
        f"        return {{name: found.as_numpy(name)[0] for name in {ends}}}",
    ]
    parts.append("\n".join(lines))
    answer = next((name for name in ("probabilities", "logits") if name in outputs), None)
    if answer is not None:
        parts.append(f"""\
def classify(path, task={first!r}, url="localhost:8000"):  # classes with their probabilities, most likely first
    classes = tasks[task]["classes"]
    values = run(path, task, url)["{called.get(answer, answer)}"][: len(classes)].astype(np.float64)
    shares = {shares_code(cards, name=answer)}
    return sorted(zip(classes, shares.tolist()), key=lambda pair: -pair[1])""")
    return parts


def describe(slot: Any, kind: str, *, batched: bool) -> str:
    """Return type and shape of an input or output as text.

    Args:
        slot: entry of the config.
        kind: the server's name of its type.
        batched: a batch stands in front of its dims.
    """
    dims = [*(["batch"] if batched else []), *("any" if dim == -1 else dim for dim in slot.dims)]
    return f"{kind.removeprefix('TYPE_').replace('STRING', 'BYTES')}, ({', '.join(map(str, dims))})"
