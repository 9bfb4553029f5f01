"""The tasks of a model that come and go while it serves, by an index file; part of a model of many tasks.

Needs the server's own module, and `vtk_rows.py` and `vtk_index.py` beside it. The index is looked at every second, and
what changed is added or removed. A task is read while the others serve, under a key of its own for every version of its
files, and a batch sees the tasks as they were when it began, so nothing waits and nothing fails. What cannot be read is
said and tried again (`vtk_index`), and what is served stays.
"""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from vtk_index import Index  # type: ignore[import-not-found]
from vtk_rows import Task, log, why  # type: ignore[import-not-found]

POLL_S = 1.0
_AGAIN = 3
"""Times that an attempt is made again at once since the index is another file."""

Add = Callable[[str, Path, Mapping[str, Any]], Task]
"""Makes the model ready for a task: key, path of its files, entry of the index. Called again with the same key after a
failure."""


class Watch:
    """Follows an index of tasks.

    Args:
        path: of the index; an entry has at least ``digest``, and the name of its files under ``files``.
        args: what the server told the model.
        files: key of an entry under which the name of its files is.
        parts: names of the files in a task's folder that its digest is of; none where it is one file.
        add: takes up a task.
        remove: drops a task by its key; nothing uses it any more.

    Attributes:
        tasks: that may be asked for.
        keys: name to key: another one for every version of a task's files.
        turn: lock of a batch, or of a change of the two above.
        index: the file.
        thread: that looks at it.
    """

    def __init__(
        self, path: Path, args: Mapping[str, str], files: str, parts: tuple[str, ...], add: Add,
        remove: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.tasks: dict[str, Task] = {}
        self.keys: dict[str, str] = {}
        self.turn = threading.Lock()
        self.index = Index(path, args)
        self._files, self._parts, self._add, self._remove = files, parts, add, remove
        self._stop = threading.Event()

    def begin(self) -> None:
        """Take up all tasks, and start to look for others.

        Raises:
            TritonModelException: some cannot be served; a server that loads the model beside an earlier one keeps that.
        """
        self.index.due()
        if wrong := self._follow():
            raise pb_utils.TritonModelException("; ".join(wrong))
        self._start()

    def check(self) -> None:
        """Start the thread again if it has ended."""
        if not self.thread.is_alive():
            log(f"nobody looked at {self.index.path} any more; that starts again")
            self._start()

    def end(self) -> None:
        """Stop looking."""
        self._stop.set()
        self.thread.join(2 * POLL_S)

    def _start(self) -> None:
        self.thread = threading.Thread(target=self._watch, name="vtk-tasks", daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                if self.index.due():
                    self._follow()
            except BaseException as error:  # whatever it was, the thread is not to end without a word
                wrong = f"{self.index.path} cannot be followed ({type(error).__name__}: {why(error)})"
                self.index.done(len(self.tasks), [wrong])

    def _follow(self) -> list[str]:
        """Serve what the index says; return what could not be done."""
        wrong = self._attempt()
        for _ in range(_AGAIN):
            if not (wrong and self.index.due()):
                break
            wrong = self._attempt()  # an export came between index and files, which were not of one another
        self.index.done(len(self.tasks), wrong)
        return wrong

    def _attempt(self) -> list[str]:
        wrong = []
        try:
            wanted = self.index.read()
        except Exception as error:
            wrong.append(f"{self.index.path} cannot be read ({why(error)})")
            wanted = None
        if wanted is not None:
            for name in [name for name in self.keys if name not in wanted]:
                self._change(name, None, None)
            for name, entry in wanted.items():
                try:
                    self._take(name, entry)
                except Exception as error:  # a damaged pack, no memory: the other tasks are not to suffer from it
                    wrong.append(f"task {name!r}: {why(error)}")
        return wrong

    def _take(self, name: str, entry: Mapping[str, Any]) -> None:
        """Serve a task as an entry of the index says, if it is not served so."""
        if missing := [key for key in ("digest", self._files) if not isinstance(entry.get(key), str)]:
            raise ValueError(f"its entry has no `{missing[0]}`")
        key = f"{name} {entry['digest']}"
        if self.keys.get(name) == key:
            return
        path = self.index.path.parent / entry[self._files]
        # zeroed or half copied weights are read without complaint; an index by hand may have any text as digest
        if re.fullmatch("[0-9a-f]{16}", entry["digest"]) and entry["digest"] != _digest(path, self._parts):
            raise ValueError(f"{path} is damaged, or not copied yet: its bytes are not those of its digest")
        self._change(name, key, self._add(key, path, entry))

    def _change(self, name: str, key: str | None, task: Task | None) -> None:
        """Between two batches, let a name mean another version of a task, or nothing."""
        with self.turn:
            old = self.keys.pop(name, None)
            self.tasks.pop(name, None)
            if key is not None and task is not None:
                self.keys[name], self.tasks[name] = key, task
            if old is not None:
                self._remove(old)


def _digest(path: Path, parts: tuple[str, ...]) -> str:
    """Return the digest of a task's files, as the export writes it into the index."""
    found = hashlib.sha256()
    for file in [path / part for part in parts] or [path]:
        if not file.is_file():
            raise ValueError(f"{file} is absent, or no plain file")
        if parts:
            found.update(json.dumps([file.name, file.stat().st_size]).encode())
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 24):
                found.update(chunk)
    return found.hexdigest()[:16]
