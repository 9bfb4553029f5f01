"""The steps of `gpu.sh all`, what matters most first, and how they share the time of one call.

Each step has a share of the whole; what one does not use goes to the next. A step that is complete takes none, so that
a call that continues spends its time on what is missing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

TOTAL = 540.0
"""Seconds of a call; the shares and `RESERVE` are of this."""

FIRST = 420.0
"""Seconds within which the steps marked ``first`` end."""

RESERVE = 10.0
"""Seconds at the end, for the summary and for what ends late."""

START = 10.0
"""Seconds from a process's start to its first row: torch, Triton and timm are imported, CUDA begins."""

ROW_S = {"library": 0.3, "ours": 0.5, "compile": 15.0, "cell": 1.2, "max-autotune": 40.0, "test file": 20.0}
"""Seconds that a row is expected to take on a card: an operator of a library; one of our kernels, which compiles; with
torch.compile; a provider of a whole model; one that is tuned; a file of tests."""


@dataclass(frozen=True)
class Step:
    """A part of the run, in a process of its own.

    Attributes:
        name: to show.
        stage: script.
        seconds: of `TOTAL`.
        args: of the script, beside those that every stage takes.
        smoke: further ones with ``--smoke``.
        first: whether it belongs to what a call must reach.
        least: seconds with less of which it is not begun: its start, and the first of its rows.
    """

    name: str
    stage: str
    seconds: float
    args: tuple[str, ...] = ()
    smoke: tuple[str, ...] = ()
    first: bool = False
    least: float = START + 2


STEPS = (
    Step("choices", "kernels", 170, ("--deciding",), first=True),
    Step("tests", "correct", 135, smoke=("--only", "op norm", "op splitk_linear", "model CB_S"), first=True),
    Step("batch 1", "e2e", 95, ("--batch-1",), first=True),
    Step("models", "e2e", 55),
    Step("breakdown", "breakdown", 25, least=20),
    Step("train", "train", 50, smoke=("--steps", "2"), least=25),
    Step("bank", "bank", 0, least=60),  # of what others leave: it copies models for every task
)


@dataclass(frozen=True)
class Outcome:
    """How a step ended.

    Attributes:
        step: which.
        code: 0 complete, 3 out of time, else it failed.
        seconds: that it took.
    """

    step: Step
    code: int
    seconds: float

    @property
    def says(self) -> str:
        """The outcome in words."""
        return {0: "complete", 1: "something failed", 3: "out of time"}.get(self.code, f"ended with {self.code}")


def allowance(left: float, step: Step, later: Sequence[Step]) -> float:
    """Return the seconds that a step may take of ``left``, with these still to come after it."""
    behind = sum(other.seconds for other in later)
    if left >= step.seconds + behind:
        return left - behind
    return max(left, 0.0) * step.seconds / max(step.seconds + behind, 1.0)


def run_plan(
    steps: Sequence[Step], total: float, launch: Callable[[Step, float], int], clock: Callable[[], float],
    done: Callable[[Step], bool] = lambda step: False, least: float | None = None,
) -> list[Outcome]:  # fmt: skip
    """Launch the steps in order, each with its allowance, and return how they ended.

    Args:
        steps: what to do.
        total: seconds for all.
        launch: runs a step in at most so many seconds, and returns its exit code.
        clock: seconds.
        done: whether an earlier call completed a step.
        least: in place of that of each step.
    """
    end = clock() + total - min(RESERVE, total / 10)
    owed = [step for step in steps if not done(step)]
    found = []
    for step in steps:
        if step not in owed:
            found.append(Outcome(step, 0, 0.0))
            continue
        owed.remove(step)
        began = clock()
        allowed = allowance(end - began, step, owed)
        code = 3 if allowed < (step.least if least is None else least) else launch(step, allowed)
        found.append(Outcome(step, code, clock() - began))
    return found


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return 0 for complete, 1 if something failed, 3 for out of time."""
    codes = {outcome.code for outcome in outcomes}
    return 1 if codes - {0, 3} else 3 if 3 in codes else 0
