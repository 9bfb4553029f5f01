"""Writes the README.md of an export of several tasks."""

import re
from collections.abc import Mapping

from vtk.card import Card
from vtk.markdown import span
from vtk.packs.readme import NO_NAMES, card_sections, code_block, shares_code
from vtk_export.readme import TASKS, input_facts, preparations

_MULTI_LABEL = 'tasks[task]["multi_label"]'


def tasks_page(
    cards: Mapping[str, Card], *, files: bool, gathered: bool, options: Mapping[str, str], batch: int | None,
    called: Mapping[str, str] = NO_NAMES,
) -> str:  # fmt: skip
    """Return the page of a folder of several tasks.

    Args:
        cards: task name to card, in the order of their numbers.
        files: each task has a file, ``NAME.onnx``.
        gathered: ``gathered.onnx`` serves all of them.
        options: session options without which each session copies the shared weights.
        batch: fixed batch size, None for any.
        called: names of inputs and outputs that differ from this toolkit's.
    """
    image, task, logits, count = (called.get(n, n) for n in ("pixel_values", "task", "logits", "num_classes"))
    code = [
        "import json\n\nimport numpy as np\nimport onnxruntime\n\n"
        'with open("tasks.json", encoding="utf-8") as file:\n    tasks = json.load(file)["tasks"]',
        preparations(cards),
    ]
    what = []
    if gathered:
        what.append(
            f"`gathered.onnx` takes `{image}` and `{task}`, int32 (batch,), the task number of each image. "
            f"It returns `{logits}`, as wide as the largest number of classes, and `{count}`."
        )
        code.append(
            'gathered = onnxruntime.InferenceSession("gathered.onnx", providers=["CPUExecutionProvider"])\n\n\n'
            "def run_gathered(path, task):  # the logits of one image; a call may mix images of several tasks\n"
            '    number = np.array([tasks[task]["number"]], np.int32)\n'
            f'    inputs = {{"{image}": prepare[task](path), "{task}": number}}\n'
            f'    logits, count = gathered.run(["{logits}", "{count}"], inputs)\n'
            "    return logits[0, : count[0]]"
        )
    if files:
        what.append("Each task has its own file, `TASK.onnx`; weights that tasks share are in one file beside them.")
        lines = (f"    options.add_session_config_entry({key!r}, {value!r})\n" for key, value in options.items())
        code.append(
            "def open_task(task):  # with this option the shared weights are in memory once for all tasks\n"
            f"    options = onnxruntime.SessionOptions()\n{''.join(lines)}"
            '    return onnxruntime.InferenceSession(tasks[task]["file"], options, '
            'providers=["CPUExecutionProvider"])'
        )
        code.append(
            "sessions = {}\n\n\n"
            "def run(path, task):  # the logits of one image\n"
            "    if task not in sessions:\n        sessions[task] = open_task(task)\n"
            f'    return sessions[task].run(["{logits}"], {{"{image}": prepare[task](path)}})[0][0]'
        )
    last = next(iter(cards))
    run = "run" if files else "run_gathered"
    code.append(
        f"def classify(path, task={last!r}):  # classes with their probabilities, most likely first\n"
        f"    values = {run}(path, task).astype(np.float64)\n    shares = {shares_code(cards)}\n"
        '    return sorted(zip(tasks[task]["classes"], shares.tolist()), key=lambda pair: -pair[1])'
    )
    several = len({card.input.size for card in cards.values()}) > 1
    facts = input_facts(cards[last], False, "fp32", batch, None, sides="height, width" * several, called=called)
    if several:
        facts += " Height and width depend on the task, see below."
    return _page(" ".join(what) + " `tasks.json` lists the file, number and classes of each task.", facts, cards, code,
                 called)  # fmt: skip


def factors_page(cards: Mapping[str, Card], *, batch: int | None, called: Mapping[str, str] = NO_NAMES) -> str:
    """Return the page of a folder of one graph and the factors of each task; arguments as of `tasks_page`."""
    last = next(iter(cards))
    # where tasks differ, one of them as default would be a guess
    alike = len({(card.input, card.multi_label) for card in cards.values()}) == 1
    like = f"like={last!r}" if alike else "like"
    image, task = (called.get(name, name) for name in ("pixel_values", "task"))
    what = (
        f"`factors.onnx` takes `{image}`, `{task}`, int32 (batch,), the slot of each image's task, and stacks of all "
        "tasks' own weights as further inputs. `TASK.safetensors` has a task's row of each stack, `factors.json` says "
        "which stacks there are, and lists tasks, classes and ranks. `vtk_factors.py` needs numpy and onnxruntime: it "
        "makes the stacks, has a session bind them once, and adds, replaces and removes tasks between two runs."
    )
    code = [
        "import json\n\nimport numpy as np\nfrom vtk_factors import FactorModel\n\n"
        'model = FactorModel(".")\n'
        'with open("factors.json", encoding="utf-8") as file:\n    tasks = json.load(file)["tasks"]',
        preparations(cards),
        f"def classify(path, task={last!r}):  # classes with their probabilities, most likely first\n"
        "    # a call may mix images of several tasks: model.run({task: images, ...})\n"
        "    values = model.run({task: prepare[task](path)})[task][0].astype(np.float64)\n"
        f"    shares = {shares_code(cards, test=_MULTI_LABEL)}\n"
        "    return sorted(zip(model.tasks[task].classes, shares.tolist()), key=lambda pair: -pair[1])",
        f"def exchange(task, file, {like}):  # a file of this folder's layout takes the place of a task's weights\n"
        "    # `like`: a task of this folder whose preprocessing, and whose way to probabilities, the new one has\n"
        "    same = prepare[like], tasks[like]\n"
        "    if task in model.tasks:\n        model.replace(task, file)\n    else:\n        model.add(task, file)\n"
        "    prepare[task], tasks[task] = same",
    ]
    accepted = (
        "`FactorModel.run` takes any number of images per task, makes other floating types and byte orders fp32, and "
        "refuses other types and shapes."
    )
    facts = input_facts(cards[last], False, "fp32", batch, None, accepted=accepted, called=called)
    return _page(what, facts, cards, code, called)


def _page(what: str, facts: str, cards: Mapping[str, Card], code: list[str], called: Mapping[str, str]) -> str:
    last = next(iter(cards))
    parts = [
        f"{TASKS}\n\n{what} "
        f"{facts}\n\n"
        "With onnxruntime and Pillow installed, run these lines in this folder; "
        f'`classify("photo.jpg", task)` returns the classes with their probabilities, most likely first; '
        f"`task` is a name such as {span(repr(last))}:\n\n{code_block(*code)}"
    ]
    for name, card in cards.items():
        sections = re.sub("^## ", "### ", card_sections(card, called=called), flags=re.MULTILINE)
        parts.append(f"## Task {span(name)}\n\n{sections}")
    return "\n".join(parts)
