"""Command lines that are printed after an export: the server, a load test, and the client."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONTAINER = "nvcr.io/nvidia/tritonserver:24.10-py3"
"""Of the release whose server the tests run; newer ones take the same configs."""

NEEDS = {"python": "'numpy<2' onnxruntime", "vtk": "'numpy<2' vit-toolkit"}
"""What the server's Python lacks in that container. Its Python back-end gives empty tensors with numpy 2."""


def command_lines(repo: Path, config: Any, server: str, tasks: Sequence[str], dims: Sequence[int]) -> list[str]:
    """Return lines for a shell.

    Args:
        repo: the repository.
        config: the model's message.
        server: back-end, ``onnxruntime``, ``python`` or ``vtk``.
        tasks: names.
        dims: (channels, height, width) of the first task's images, with the batch in front where it is fixed.
    """
    start = "tritonserver --model-repository=/models --disable-auto-complete-config"
    if server in NEEDS:
        start = f"bash -c {shlex.quote(f'pip install {NEEDS[server]} && {start}')}"
    # the Python back-end hands tensors over in shared memory, of which a container has little
    memory = " --shm-size=1g" if server in NEEDS else ""
    gpus = "" if config.instance_group[0].kind == 2 else " --gpus=all"  # KIND_CPU
    mount = shlex.quote(f"{repo.absolute()}:/models:ro")
    lines = [f"docker run --rm{gpus}{memory} -p8000:8000 -p8001:8001 -p8002:8002 -v {mount} {CONTAINER} {start}"]
    test = f"perf_analyzer -m {shlex.quote(config.name)} -i grpc -u localhost:8001 --concurrency-range 1:8"
    if any(entry.name == "pixel_values" and -1 in entry.dims for entry in config.input):
        test += f" --shape pixel_values:{','.join(map(str, dims))}"
    if any(entry.name == "task" for entry in config.input):
        test += f" --string-data {shlex.quote(tasks[0])}"
    lines.append(test)
    client = shlex.quote(str(repo / config.name / "client.py"))
    task = f" --task {shlex.quote(tasks[0])}" if len(tasks) > 1 else ""
    lines.append(f"python {client} photo.jpg{task} --protocol grpc")
    return lines
