"""The result of tuning a model's choices at one batch size, and the line that says it."""

from dataclasses import dataclass, field

from vtk_kernels.choices import Question


@dataclass
class Tuning:
    """What tuning one subject measured and changed.

    Attributes:
        label: of the subject.
        asked: how many choices the model has at this batch size.
        measured: of them, how many were measured now.
        changed: of these, what was chosen before and is now, by question.
        left_out: alternatives that were not timed, and why.
        before_us, after_us: of a pass, both measured at the end in turns; None where nothing changed.
        seconds: that it took.
        cut, stopped: whether time ran out, and whether somebody stopped it; the others keep what held before.
        path: of the table that was written.
    """

    label: str
    path: str
    asked: int = 0
    measured: int = 0
    changed: dict[Question, tuple[str, str]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    before_us: float | None = None
    after_us: float | None = None
    seconds: float = 0.0
    cut: bool = False
    stopped: bool = False

    @property
    def cached(self) -> bool:
        """Whether everything was known already."""
        return not self.measured and not self.cut and not self.stopped and not self.left_out

    def __str__(self) -> str:
        if self.cached:
            return f"{self.label}: {self.asked} choices, all tuned before ({self.path})"
        ended = ", stopped" if self.stopped else f", cut after {self.seconds:.0f} s" if self.cut else ""
        did = f"{self.label}: {self.measured} of {self.asked} choices measured in {self.seconds:.1f} s{ended}"
        if self.left_out and not self.measured:
            return f"{did}: {self.left_out[0]}"
        if not self.changed:
            return f"{did}; those that held stay ({self.path})"
        if self.before_us is None or self.after_us is None:
            return f"{did}; {len(self.changed)} changed, not measured together ({self.path})"
        change = 100 * (self.after_us / self.before_us - 1)
        return (
            f"{did}; {len(self.changed)} changed: {self.before_us:.1f} → {self.after_us:.1f} µs a pass, "
            f"{change:+.1f} % ({self.path})"
        )
