"""``vtk profile``: latency, throughput and memory per batch size and back-end, after a comparison of outputs."""

import shlex
from pathlib import Path

from vtk import console
from vtk.commands import _cli
from vtk.profiling.config import ProfileCommand

_TEXT = """Measure latency, throughput and memory per batch size and back-end; outputs are compared first.

`vtk profile --server HOST:PORT` drives a live inference server instead; `--server x --help` shows its options."""

_SERVER = """Load-test a live server that speaks KServe's v2 protocol (Triton and others).

Closed loops (--concurrency) keep a number of requests in flight. Open loops (--rate) send requests at random times,
independent of the server, and time each from its due time: percentiles are free of coordinated omission. Queue and
compute times are the server's own. With --reference, answers are compared before and after every load (exit code 4)."""


def main(argv: list[str]) -> int:
    """Run ``vtk profile``; exit code 4 if the outputs of a back-end are wrong."""
    if any(arg == "--server" or arg.startswith("--server=") for arg in argv):
        return _server(argv)
    config = _cli.parse(
        ProfileCommand,
        argv,
        prog="vtk profile",
        description=_TEXT,
        positional=("source",),
        examples=(
            "vtk profile runs/pets/task --budget-ms 20 --out runs/pets/profile",
            "vtk profile runs/pets/task --budget-ms 20 --on cpu --data data/pets --out runs/pets/search",
            "vtk profile runs/pets/onnx/model.onnx --backends ort-cpu --threads 4",
            "vtk profile vit_small_patch16_224 --no-pretrained --batch-sizes 1,8 --backends eager,compile",
            "vtk profile vit_small_patch16_224 --no-pretrained --img-sizes 224,384 --ceilings --out sizes",
            "vtk profile --compare old/profile.json new/profile.json --fail-above 5",
        ),
    )
    command = shlex.join(["vtk", "profile", *argv])
    if config.compare:
        return _compare(config)
    if not config.source:
        return _ceilings(config)
    if config.img_sizes:
        return _sizes(config, command)
    if config.on is not None:
        return _search(config, command)
    from vtk.profiling.profile import profile
    from vtk.profiling.report import FILES, print_result

    result = profile(config.source, config, command=command, **config.opening())
    print_result(result)
    if config.out is not None:
        console.say()
        for name in FILES:
            console.say(f"wrote {config.out / name}")
    else:
        console.say("no files written; --out DIR writes a plot, a page for the browser, JSON and CSV")
    console.emit_json(result.to_dict())
    return result.exit_code


def _search(config: ProfileCommand, command: str) -> int:
    from vtk.profiling.search.report import FILES, print_search
    from vtk.profiling.search.search import search_setups

    result = search_setups(config.source, config, command=command, **config.opening())
    if config.out is not None:
        for name in FILES:
            console.say(f"wrote {config.out / name}")
    else:
        console.say("no files written; --out DIR writes the plot of the frontier, JSON and CSV")
    print_search(result)
    console.emit_json(result.to_dict())
    return result.exit_code


def _server(argv: list[str]) -> int:
    from vtk.profiling.server.config import ServerConfig

    config = _cli.parse(
        ServerConfig,
        argv,
        prog="vtk profile",
        description=_SERVER,
        examples=(
            "vtk profile --server 127.0.0.1:8000 --model pets --concurrency 1,8,32 --reference runs/pets/task",
            "vtk profile --server 127.0.0.1:8001 --protocol grpc --model pets --rate 50,100,200 --budget-ms 50",
        ),
    )
    from vtk.profiling.server.drive import profile_server
    from vtk.profiling.server.report import FILES, print_result

    result = profile_server(config, command=shlex.join(["vtk", "profile", *argv]))
    print_result(result)
    if config.out is not None:
        for name in FILES:
            console.say(f"wrote {config.out / name}")
    console.emit_json(result.to_dict())
    return result.exit_code


def _compare(config: ProfileCommand) -> int:
    from vtk.profiling.regression import compare_profiles, print_comparison

    old, new = config.compare
    found = compare_profiles(Path(old), Path(new))
    print_comparison(found, config.compare)
    failed = [] if config.fail_above is None else found.failures(config.fail_above)
    for text in failed:
        console.warn(text)
    console.emit_json({**found.to_dict(), "failed": len(failed)})
    return 4 if failed else 0


def _ceilings(config: ProfileCommand) -> int:
    import dataclasses

    import torch

    from vtk.data.pinning import pinned
    from vtk.models.devices import resolve_device
    from vtk.profiling import ceilings

    device = resolve_device(config.device)
    with pinned(config.cpus, config.threads) as chosen:
        threads = chosen or torch.get_num_threads()
        found = ceilings.measure(device, threads)
    console.say(f"{ceilings.key(device, threads)}: {ceilings.describe(found)}")
    console.say(f"stored in {ceilings.path()}")
    console.emit_json({"device": ceilings.key(device, threads), **dataclasses.asdict(found)})
    return 0


def _sizes(config: ProfileCommand, command: str) -> int:
    from vtk.profiling.sizes import print_sizes, profile_sizes

    results = profile_sizes(config.source, config, command=command, **config.opening())
    print_sizes(results)
    for result in results:
        if result.budget:
            console.say(f"{result.input_shape[1]} px: {result.budget}")
        for text in result.warnings:
            console.warn(f"{result.input_shape[1]} px: {text}")
    if config.out is not None:
        console.say(f"wrote {config.out / 'sizes.html'} and a report for each size beside it")
    console.emit_json({"results": [result.to_dict() for result in results]})
    return max(result.exit_code for result in results)
