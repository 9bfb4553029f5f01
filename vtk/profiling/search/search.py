"""`search_setups`: the best way of serving a model on this CPU within a latency budget, by measurement."""

import contextlib
import datetime
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from vtk import console
from vtk.data.cpus import usable_cpus
from vtk.data.pinning import parse_cores, pinned, show_cores
from vtk.errors import UsageError, VtkError
from vtk.filesets import open_folder
from vtk.options import expect
from vtk.packages import require
from vtk.profiling.config import ProfileConfig
from vtk.profiling.inputs import make_inputs
from vtk.profiling.machine import cpu_name, versions
from vtk.profiling.reference import reference_of
from vtk.profiling.search import racing
from vtk.profiling.search.accuracy import Judge, Verdict
from vtk.profiling.search.fleet import Calls, Fleet
from vtk.profiling.search.recommendation import EXPORTED, command_for, note_for
from vtk.profiling.search.result import SearchResult, choice_of, rows_of
from vtk.profiling.search.setup import Setup, judged_percentile, shapes
from vtk.profiling.search.variants import Variant, find_variants
from vtk.runtime.backends.base import load_backend
from vtk.runtime.data_option import data_images
from vtk.runtime.opening import open_source, open_with_notes
from vtk.runtime.source import MODELS, Opening, Source

if TYPE_CHECKING:
    from vtk.runtime.source import Openable

DISTINCT = 8
"""Different images of the calls; larger batches repeat them in turn."""

JUDGED = 256
"""Images of ``--data`` that accuracy is measured on, as many as by an export."""


def search_setups(
    source: "Openable",
    config: ProfileConfig,
    *,
    command: str = "",
    show_progress: bool = True,
    **opening: Unpack[Opening],
) -> SearchResult:
    """Find the setup with the most images per second within ``config.budget_ms`` that keeps the accuracy gate.

    Args:
        source: as for `vtk.profile`.
        config: options, with ``on="cpu"`` and a budget.
        command: kept in the report.
        show_progress: a bar on a terminal, lines elsewhere.
        opening: how to open the source, see `vtk.open_source`.

    Raises:
        UsageError: a back-end that does not run this source, or that the search does not know.
        DataError: the source or the images cannot be read, or ``out`` is not empty.
        UnavailableError: a back-end that was named is not available.
    """
    expect(config, ProfileConfig, "search_setups")
    if config.on is None or config.budget_ms is None:
        raise UsageError("a search needs `--on cpu` and `--budget-ms`; without them, use `vtk.profile`")
    given = str(source) if isinstance(source, (str, Path)) else ""
    with contextlib.ExitStack() as stack:
        if config.out is not None:
            from vtk.profiling.search.report import MARKS, write_search

            require("matplotlib")
            stack.enter_context(open_folder(config.out, MARKS, command or "vtk profile", overwrite=config.overwrite))
        stack.enter_context(pinned(config.cpus, config.threads))
        opened = open_with_notes(source, **opening)
        result = _search(opened, config, given, opening, command, show_progress)
        if config.out is not None:
            write_search(result, config.out)
    return result


def _search(
    source: Source, config: ProfileConfig, given: str, opening: Mapping[str, Any], command: str, show: bool
) -> SearchResult:
    assert config.budget_ms is not None
    cpus = usable_cpus()
    reference = source if config.reference is None else open_source(config.reference, trust=opening.get("trust", False))
    with contextlib.ExitStack() as stack:
        variants = find_variants(source, config, stack)
        verdicts = _judge(variants, reference, config, min(cpus, torch.get_num_threads()))
        passed = {v.key: v for v, verdict in zip(variants, verdicts, strict=True) if verdict.passed}
        inputs = make_inputs(source, DISTINCT, seed=config.seed)
        precision = source.facts.precision
        against = reference_of(source, reference, inputs, precision, load_backend, torch.device("cpu"), cpus)
        setups = _setups(passed, config, cpus)
        q = judged_percentile(config.budget_ms, config.duration)
        race = racing.Race(config.budget_ms, q, setups)
        stopped, start = False, time.perf_counter()
        total = len(setups)
        with console.progress("search", total, unit="setups", enabled=show) as bar:
            seen: set[Setup] = set()

            def tell(setup: Setup) -> None:
                bar.advance(int(setup not in seen), setup.text)
                seen.add(setup)

            calls = Calls(
                {inputs.name: inputs.images, **inputs.more}, against.logits, against.probabilities, config.duration,
                config.budget_ms, hasty=not config.exhaustive,
            )  # fmt: skip
            fleet = stack.enter_context(Fleet(passed, calls, _weights(passed), race.readings, tell))
            try:
                (racing.exhaustive if config.exhaustive else racing.search)(race, fleet.measure)
                exported = _exported(race, source)
                if exported is not race:
                    racing.search(exported, fleet.measure)
            except KeyboardInterrupt:
                stopped, exported = True, race
                if not race.measured:
                    raise
        seconds = time.perf_counter() - start
        best = exported.best
        rows = rows_of(race, fleet.reasons)
        chosen = None if best is None else next(row for row in rows if row.setup == best)
        return SearchResult(
            source=given or source.name, kind=source.kind, model=source.card.model.name,
            input_shape=(source.card.input.in_chans, *source.card.input.size), device_name=_where(config), cpus=cpus,
            budget_ms=config.budget_ms, percentile=q, duration_s=config.duration, exhaustive=config.exhaustive,
            cut=race.cut, stopped=stopped, reference=against.described, inputs=inputs.what, accuracy=tuple(verdicts),
            setups=rows, choice=None if best is None else choice_of(exported, best), best=chosen,
            faster=_faster(race, best),
            command="" if best is None else command_for(best, source, given, config, opening),
            note="" if best is None else note_for(best), search_s=seconds,
            exhaustive_s=len(setups) * config.duration, versions=versions(), ran=command,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), wrong=bool(fleet.wrong),
        )  # fmt: skip


def _where(config: ProfileConfig) -> str:
    return cpu_name() + (f", cores {show_cores(parse_cores(config.cpus))}" if config.cpus else "")


def _judge(variants: list[Variant], reference: Source, config: ProfileConfig, threads: int) -> list[Verdict]:
    """Return the verdict on each variant; without ``--data`` only outputs on random images are compared, later."""
    card = reference.card
    given = None if config.data is None else data_images(card, config.data, described=reference.described)
    raw = any(v.source is not None and v.source.facts.preprocessing for v in variants)
    judge = None if given is None or raw else Judge(reference, given, JUDGED, threads)
    found = []
    for variant in variants:
        if variant.source is None:
            found.append(Verdict(*variant.key, False, variant.refused))
        elif judge is None:
            found.append(Verdict(*variant.key, True))
        else:
            console.say(f"accuracy of {variant.backend} {variant.precision}")
            try:
                found.append(judge.judge(variant))
            except VtkError as error:
                found.append(Verdict(*variant.key, False, str(error)))
    return found


def _setups(passed: Mapping[tuple[str, str], Variant], config: ProfileConfig, cpus: int) -> tuple[Setup, ...]:
    """Return the setups of the variants, those of ``--batch-sizes`` that each takes."""
    found = []
    for variant in passed.values():
        for batch in sorted(config.batch_sizes):
            if variant.least <= batch <= (variant.most or batch):
                found += [Setup(*variant.key, threads, n, batch) for threads, n in shapes(cpus, config.threads)]
    if not found and passed:
        sizes = ", ".join(f"{v.least} to {v.most}" for v in passed.values())
        raise UsageError(f"`--batch-sizes` has none that this file takes ({sizes} images a call); give one")
    return tuple(sorted(found))


def _weights(passed: Mapping[tuple[str, str], Variant]) -> int:
    """Return the bytes of the largest copy of the weights."""
    sizes = [0]
    for variant in passed.values():
        source = variant.source
        if source is not None and source.kind not in MODELS and source.path is not None:
            parts = source.path.parent.glob(f"{source.path.stem}*")
            sizes.append(sum(part.stat().st_size for part in parts if part.is_file()))
        elif source is not None:
            sizes.append(sum(p.numel() * p.element_size() for p in source.model().parameters()))
    return max(sizes)


def _exported(race: racing.Race, source: Source) -> racing.Race:
    """Return the race among the setups that have a file, where the best one has none; else the race itself."""
    best = race.best
    files = tuple(s for s in race.setups if s.backend in EXPORTED)
    if source.kind not in MODELS or best is None or best.backend in EXPORTED or not files:
        return race
    return replace(race, setups=files, out={s: why for s, why in race.out.items() if why == "failed"}, cut=False)


def _faster(race: racing.Race, chosen: Setup | None) -> str:
    best = race.best
    if chosen is None or best is None or best == chosen or race.rate(best) <= race.rate(chosen):
        return ""
    gain = race.rate(best) / race.rate(chosen) - 1
    return f"{best.text} has {100 * gain:.0f} % more images/s, but no file to export"
