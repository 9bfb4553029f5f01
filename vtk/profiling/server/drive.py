"""`profile_server`: measures a live server at every batch size and load."""

import datetime
import itertools

from vtk import console
from vtk.filesets import open_folder
from vtk.options import expect
from vtk.packages import require
from vtk.profiling.server.config import ServerConfig
from vtk.profiling.server.connect import choose_model, connect
from vtk.profiling.server.result import ServerLevel, ServerResult
from vtk.profiling.server.search import search
from vtk.profiling.server.traffic import Traffic
from vtk.runtime.opening import open_source


def profile_server(config: ServerConfig, *, command: str = "", show_progress: bool = True) -> ServerResult:
    """Drive a live server and measure it from outside.

    Args:
        config: options.
        command: kept in the report.
        show_progress: a bar on a terminal, lines elsewhere.

    Raises:
        UsageError: the model takes no images, or their size is not known.
        UnavailableError: nobody answers, there is no such model, or the package for the protocol is missing.
        DataError: the reference cannot be read, or ``out`` is not empty.
    """
    expect(config, ServerConfig, "profile_server")
    if config.out is None:
        return _drive(config, command, show_progress)
    from vtk.profiling.server.report import MARKS, write_report

    require("matplotlib")
    with open_folder(config.out, MARKS, command or "vtk profile", overwrite=config.overwrite):
        result = _drive(config, command, show_progress)
        write_report(result, config.out)
    return result


def _drive(config: ServerConfig, command: str, show_progress: bool) -> ServerResult:
    source = None if config.reference is None else open_source(config.reference, base=config.base)
    client = connect(config.server, config.protocol, config.timeout)
    try:
        info = choose_model(client, config.model)
        traffic = Traffic(client, info, config, source)
        levels: list[ServerLevel] = []
        stopped = False
        try:
            _measure_all(traffic, config, levels, show_progress)
        except KeyboardInterrupt:
            if not levels:
                raise
            stopped = True
    finally:
        client.close()
    result = ServerResult(
        server=config.server, protocol=config.protocol, model=info.name, version=info.version, platform=info.platform,
        reference=traffic.described, inputs=traffic.inputs, stability_pct=config.stability, levels=tuple(levels),
        budget_ms=config.budget_ms, stopped=stopped, command=command,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
    return result


def _measure_all(traffic: "Traffic", config: ServerConfig, levels: list[ServerLevel], show: bool) -> None:
    """Add every load to ``levels`` as soon as it is measured."""
    sizes = sorted(config.batch_sizes)
    if config.searches:
        with console.progress("profile", len(sizes), unit="batch sizes", enabled=show) as bar:
            for batch in sizes:
                search(traffic.measure, batch, config.budget_ms or 0.0, levels)
                bar.advance(1, f"batch {batch}")
        return
    loads = [("closed", c, None) for c in config.clients] + [("open", None, r) for r in config.rate]
    plan = list(itertools.product(sizes, loads))
    with console.progress("profile", len(plan), unit="loads", enabled=show) as bar:
        for batch, (loop, concurrency, rate) in plan:
            level = ServerLevel(batch, loop, concurrency, rate)  # type: ignore[arg-type]
            levels.append(traffic.measure(level))
            bar.advance(1, f"batch {batch}, {level.load}")
