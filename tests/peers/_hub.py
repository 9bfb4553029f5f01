"""A stand-in of the Hugging Face hub on this machine: one repository, for its real clients."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_repository(repo_id: str, folder: Path) -> Iterator[str]:
    """Yield the address of a server that has ``folder`` as a repository of models.

    Args:
        repo_id: ``USER/NAME``.
        folder: its files.
    """
    files = {file.name: file.read_bytes() for file in folder.iterdir()}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{repo_id}"):
                siblings = [{"rfilename": name} for name in files]
                facts = {"id": repo_id, "modelId": repo_id, "sha": COMMIT, "siblings": siblings, "tags": []}
                self.answer(200, json.dumps(facts).encode(), "")
                return
            name = path.removeprefix(f"/{repo_id}/resolve/").partition("/")[2]
            if name in files:
                self.answer(200, files[name], hashlib.sha256(files[name]).hexdigest())
            else:
                self.answer(404, b"", "", **{"X-Error-Code": "EntryNotFound"})

        do_HEAD = do_GET

        def answer(self, status: int, content: bytes, etag: str, **headers: str) -> None:
            self.send_response(status)
            headers |= {"Content-Length": str(len(content)), "X-Repo-Commit": COMMIT} | ({"ETag": etag} if etag else {})
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
