"""Command lines that are printed after an export: the server, a load test, and the client."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONTAINER = "nvcr.io/nvidia/tritonserver:24.10-py3"
"""Of the release whose server the tests run; newer ones take the same configs."""

NEEDS = {"python": ("onnxruntime",), "vtk": ("vit-toolkit",)}
"""What the server's Python lacks in that container. Its Python back-end gives empty tensors with numpy 2."""


def command_lines(
    repo: Path, config: Any, server: str, tasks: Sequence[str], dims: Sequence[int], *, ensemble: str = ""
) -> list[str]:
    """Return lines for a shell.

    Args:
        repo: the repository.
        config: the message of the model, in an ensemble of that which classifies.
        server: back-end, ``onnxruntime``, ``python`` or ``vtk``.
        tasks: names.
        dims: of the first task's images as the model takes them, with the batch in front where it is fixed.
        ensemble: name of that which the model is a step of.
    """
    start = "tritonserver --model-repository=/models --disable-auto-complete-config"
    needs = (*NEEDS.get(server, ()), *(("pillow",) if ensemble else ()))
    if needs:
        start = f"bash -c {shlex.quote(' '.join(['pip install', shlex.quote('numpy<2'), *needs, '&&', start]))}"
    # the Python back-end hands tensors over in shared memory, of which a container has little
    memory = " --shm-size=1g" if needs else ""
    gpus = "" if config.instance_group[0].kind == 2 else " --gpus=all"  # KIND_CPU
    mount = shlex.quote(f"{repo.absolute()}:/models:ro")
    lines = [f"docker run --rm{gpus}{memory} -p8000:8000 -p8001:8001 -p8002:8002 -v {mount} {CONTAINER} {start}"]
    test = f"perf_analyzer -m {shlex.quote(config.name)} -i grpc -u localhost:8001 --concurrency-range 1:8"
    for entry in config.input:
        if -1 in entry.dims:
            test += f" --shape {entry.name}:{','.join(map(str, dims))}"
    if any(entry.name == "task" for entry in config.input):
        test += f" --string-data {shlex.quote(tasks[0])}"
    lines.append(test)
    client = shlex.quote(str(repo / (ensemble or config.name) / "client.py"))
    task = f" --task {shlex.quote(tasks[0])}" if len(tasks) > 1 else ""
    lines.append(f"python {client} photo.jpg{task} --protocol grpc")
    return lines
