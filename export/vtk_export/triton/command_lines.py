"""Composes the command lines that are printed after an export: server, load test, client."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vtk_export.triton.pbtxt import messages, names_in
from vtk_export.triton.served_by import Server


def command_lines(
    repo: Path, config: Any, served: Server, tasks: Sequence[str], dims: Sequence[int], *, ensemble: str = ""
) -> list[str]:
    """Return the command lines of the server, a load test and the client.

    Args:
        repo: the repository.
        config: the message of the model, in an ensemble of that which classifies.
        served: image and packages.
        tasks: names.
        dims: of the first task's images as the model takes them, with the batch in front where it is fixed.
        ensemble: name of that which the model is a step of.
    """
    start = "tritonserver --model-repository=/models --disable-auto-complete-config"
    needs = (*served.packages, *(("pillow",) if ensemble else ()))
    if needs:
        # the server's Python back-end gives empty tensors with numpy 2
        words = [shlex.quote(need) for need in ("numpy<2", *needs)]
        start = f"bash -c {shlex.quote(' '.join(['pip install', *words, '&&', start]))}"
    # the Python back-end hands tensors over in shared memory, of which a container has little
    memory = " --shm-size=1g" if needs else ""
    gpus = " --gpus=all" if _takes_gpus(config) else ""
    mount = shlex.quote(f"{repo.absolute()}:/models:ro")
    lines = [f"docker run --rm{gpus}{memory} -p8000:8000 -p8001:8001 -p8002:8002 -v {mount} {served.image} {start}"]
    test = f"perf_analyzer -m {shlex.quote(config.name)} -i grpc -u localhost:8001 --concurrency-range 1:8"
    for entry in config.input:
        if -1 in entry.dims:
            test += f" --shape {entry.name}:{','.join(map(str, dims))}"
    for entry in config.input:
        if entry.name == names_in(config).get("task", "task"):  # numbers at random would be of no task
            named = entry.data_type == messages().DataType.Value("TYPE_STRING")
            test += f" --string-data {shlex.quote(tasks[0])}" if named else " --input-data zero"
    lines.append(test)
    client = shlex.quote(str(repo / (ensemble or config.name) / "client.py"))
    task = f" --task {shlex.quote(tasks[0])}" if len(tasks) > 1 else ""
    lines.append(f"python {client} photo.jpg{task} --protocol grpc")
    return lines


def _takes_gpus(config: Any) -> bool:
    """Return whether the container is to see GPUs; on a machine without any, one that asks for them does not start."""
    kinds = messages().ModelInstanceGroup.Kind
    kind = config.instance_group[0].kind
    # the line mounts a folder of this machine, so it is for this machine
    return bool(kind == kinds.Value("KIND_GPU") or (kind == kinds.Value("KIND_AUTO") and torch.cuda.is_available()))
