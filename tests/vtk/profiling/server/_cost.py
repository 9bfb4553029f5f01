"""Client CPU-seconds per request with answers checked and not checked, in windows that take turns.

``python _cost.py SIDE CLASSES BATCH``: a server of fixed answers in a process of its own, the client in this one.
Prints the median over nine pairs of windows of checked / unchecked, the comparison after the window included.
"""

import itertools
import json
import multiprocessing
import socket
import statistics
import sys
import threading
import time

import numpy as np
import torch

from vtk.profiling.server.answers import Expected, Sample, sample_size
from vtk.profiling.server.client import ModelInfo, TensorSpec
from vtk.profiling.server.http_client import HttpClient
from vtk.profiling.server.load import closed_loop
from vtk.profiling.server.pool import Pool

WINDOWS, WINDOW_S, CLIENTS = 9, 1.0, 4


def serve(listener: socket.socket, meta: bytes, answer: bytes) -> None:
    """Answer whatever comes with the same bytes."""

    def one(connection: socket.socket) -> None:
        reader = connection.makefile("rb")
        while line := reader.readline():
            length = 0
            while (header := reader.readline()) not in (b"\r\n", b""):
                if header.lower().startswith(b"content-length:"):
                    length = int(header.split(b":")[1])
            left = length
            while left:
                left -= len(reader.read(min(left, 1 << 20)))
            connection.sendall(meta if line.startswith(b"GET") else answer)

    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=one, args=(connection,), daemon=True).start()


def reply(head: bytes, raw: bytes = b"") -> bytes:
    binary = f"Inference-Header-Content-Length: {len(head)}\r\n" if raw else ""
    lines = f"HTTP/1.1 200 OK\r\nContent-Type: x\r\n{binary}Content-Length: {len(head) + len(raw)}\r\n\r\n"
    return lines.encode() + head + raw


def main(side: int, classes: int, batch: int) -> None:
    row = np.random.default_rng(0).normal(size=classes).astype(np.float32)
    raw = np.tile(row, (batch, 1)).tobytes()
    entry = {"name": "logits", "datatype": "FP32", "shape": [batch, classes]}
    head = json.dumps({"outputs": [{**entry, "parameters": {"binary_data_size": len(raw)}}]}).encode()
    meta = reply(json.dumps({"extensions": ["binary_tensor_data"]}).encode())
    listener = socket.create_server(("127.0.0.1", 0))
    server = multiprocessing.get_context("fork").Process(
        target=serve, args=(listener, meta, reply(head, raw)), daemon=True
    )
    server.start()
    try:
        client = HttpClient(f"127.0.0.1:{listener.getsockname()[1]}", 30.0)
        shape = (-1, 3, side, side)
        info = ModelInfo("m", "", "", (TensorSpec("pixel_values", "FP32", shape),), (TensorSpec("logits", "FP32", ()),))
        pool = Pool(np.random.default_rng(1).normal(size=(8, *shape[1:])).astype(np.float32))
        expected = Expected(torch.from_numpy(row).expand(len(pool), -1), "fp32")
        numbers = itertools.count()

        def window(check: bool) -> float:
            sample = Sample(sample_size(4 * classes * batch)) if check else None
            begin = time.process_time()
            run = closed_loop(
                client.infer, CLIENTS, WINDOW_S, numbers=numbers, sample=sample,
                make=lambda number: client.request(info, pool, number, batch, {}),
            )  # fmt: skip
            if sample is not None:
                found = expected.judge(sample.kept, lambda a: client.decode(a, "logits"), lambda n: pool.rows(n, batch))
                assert found.checked > 0 == found.wrong, found
            assert not run.failed
            return (time.process_time() - begin) / len(run.latencies)

        window(True)
        pairs = []
        for turn in range(WINDOWS):
            first = window(turn % 2 == 0)
            second = window(turn % 2 == 1)
            checked, unchecked = (first, second) if turn % 2 == 0 else (second, first)
            pairs.append((checked, unchecked))
        ratios = [a / b for a, b in pairs]
        each = 1e6 * statistics.median(b for _, b in pairs)
        print(json.dumps({"ratio": statistics.median(ratios), "unchecked_us": each, "ratios": ratios}))
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
