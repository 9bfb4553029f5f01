"""The result of a profile: plain values that survive JSON, and what follows from them."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vtk.card import from_plain
from vtk.errors import DataError
from vtk.formats import read_json
from vtk.profiling.budget import Candidate, Choice, choose
from vtk.profiling.cautions import warnings_of
from vtk.profiling.cells import BackendResult, Cell, Curve
from vtk.profiling.stats import runs_needed
from vtk.profiling.work import Ceilings, Work

SCHEMA = 3
"""Version of ``profile.json``; files of versions 1 and 2 lack fields that have defaults here, and are read."""


@dataclass(frozen=True)
class ProfileResult:
    """A whole profile; `to_dict` is ``profile.json``.

    Attributes:
        source: as given.
        kind: pack, checkpoint, onnx, aoti, tensorrt or timm.
        model: name of the model.
        input_shape: (channels, height, width).
        device: on which back-ends were asked to run.
        device_name: the hardware.
        precision: of weights and inputs.
        threads: CPU threads of every back-end.
        duration_s: per cell.
        reference: what outputs were compared with.
        inputs: which images, and whether copies from the host are in the times.
        order: of the cells.
        memory: what the memory columns mean here.
        backends: in the order they were measured.
        remarks: what weakens the comparison, for instance outputs that hardly depend on the image.
        budget_ms: as asked for.
        h2d: whether copies from and to the host are in the times.
        stability_pct: percent within which the last windows of a stable cell agree.
        work: of one image, None where it could not be counted.
        ceilings: of the device, None where they were not measured.
        stopped: somebody stopped it (Ctrl-C); what was measured by then is here.
        versions: of Python and the packages that matter.
        command: the command line.
        date: UTC, ISO 8601.
        schema: version of this layout.
    """

    source: str
    kind: str
    model: str
    input_shape: tuple[int, ...]
    device: str
    device_name: str
    precision: str
    threads: int
    duration_s: float
    reference: str
    inputs: str
    order: str
    memory: str
    backends: tuple[BackendResult, ...]
    remarks: tuple[str, ...] = ()
    budget_ms: float | None = None
    h2d: Literal["in", "out"] = "out"
    stability_pct: float | None = None
    work: Work | None = None
    ceilings: Ceilings | None = None
    stopped: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    command: str = ""
    date: str = ""
    schema: int = SCHEMA

    def cells(self) -> Iterator[tuple[BackendResult, Cell]]:
        """Yield every cell with its back-end."""
        for backend in self.backends:
            for cell in backend.cells:
                yield backend, cell

    def curves(self) -> list[Curve]:
        """Return the timed cells of each back-end that has any."""
        curves = []
        for i, backend in enumerate(self.backends):
            timed = [c for c in backend.cells if c.status == "ok" and c.typical_ms is not None]
            if timed:
                curves.append(Curve(i, backend.name, sorted(timed, key=lambda c: c.batch)))
        return curves

    @property
    def has_roofline(self) -> bool:
        """Whether the work and the ceilings are known, and some cell was judged by them."""
        known = self.work is not None and self.ceilings is not None
        return known and any(cell.roofline is not None and cell.typical_ms for _, cell in self.cells())

    @property
    def exit_code(self) -> int:
        """4 when an output was wrong, 130 when stopped, 1 when a back-end failed or nothing was measured, else 0."""
        statuses = {b.status for b in self.backends} | {cell.status for _, cell in self.cells()}
        if "mismatch" in statuses:
            return 4
        if self.stopped:
            return 130
        return 1 if "failed" in statuses or "ok" not in statuses else 0

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes numbers of this profile doubtful, one line each."""
        return warnings_of(self)

    @property
    def choice(self) -> Choice | None:
        """Back-end and batch size that meet ``budget_ms`` with the most images per second, or are nearest to it."""
        if self.budget_ms is None:
            return None
        timed = [(backend, cell) for backend, cell in self.cells() if cell.status == "ok"]
        largest = max((cell.batch for _, cell in self.cells()), default=0)
        found = [
            Candidate(
                f"batch {cell.batch} with {backend.name}", cell.batch, backend.name, cell.p50_ms, cell.p90_ms,
                cell.p99_ms, cell.images_per_second or 0.0, cell.stable, cell.batch == largest,
            )
            for backend, cell in timed
        ]  # fmt: skip
        return choose(self.budget_ms, found, none="no measured batch size")

    @property
    def budget(self) -> str:
        """`choice` in one line, and what could not be judged; empty without a budget."""
        if self.budget_ms is None:
            return ""
        choice = self.choice
        text = f"budget {self.budget_ms:g} ms: no batch size could be judged" if choice is None else choice.text
        unjudged = [f"{b.name} batch {c.batch}" for b, c in self.cells() if c.status == "ok" and c.p50_ms is None]
        if unjudged:
            text += f" (not judged, fewer than {runs_needed(50)} runs: {', '.join(unjudged)})"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, with what follows from the measurements."""
        choice = None if self.choice is None else dataclasses.asdict(self.choice)
        derived = {"budget": self.budget, "choice": choice, "warnings": list(self.warnings)}
        return {**dataclasses.asdict(self), **derived, "exit_code": self.exit_code}

    @classmethod
    def read(cls, path: Path) -> "ProfileResult":
        """Read a ``profile.json``.

        Raises:
            DataError: not such a file, or from a newer version.
        """
        value = read_json(path)
        if not isinstance(value, dict) or not isinstance(value.get("schema"), int):
            raise DataError(f"{path} is not a profile: it has no `schema` number")
        if value["schema"] > SCHEMA:
            raise DataError(f"{path} was written by a newer vtk (schema {value['schema']}); upgrade vtk")
        plain = {k: v for k, v in value.items() if k not in ("budget", "choice", "warnings", "exit_code")}
        return from_plain(cls, plain, str(path))
