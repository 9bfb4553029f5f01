"""Instances of a search in this process, in place of one each: starting a process takes seconds."""

import pickle
from typing import Any

import pytest

from vtk.profiling.search import fleet
from vtk.profiling.search.instance import Instance


class Local:
    """An instance in this process; what it is sent and returns is pickled as it would be."""

    alive, log = True, list[str]()

    def __init__(self) -> None:
        self.held: list[tuple[object, ...]] = []
        self.instance: Instance | None = None

    def send(self, name: str, arguments: tuple[Any, ...]) -> bool:
        name, arguments = pickle.loads(pickle.dumps((name, arguments)))
        Local.log.append(name)
        try:
            if self.instance is None:
                self.instance, self.answer = Instance(*arguments), (True, None)
            else:
                self.answer = (True, getattr(self.instance, name)(*arguments))
        except Exception as error:
            self.answer = (False, str(error))
        return True

    def receive(self) -> Any:
        return pickle.loads(pickle.dumps(self.answer))

    def close(self) -> None:
        for backend in self.instance.loaded.values() if self.instance else ():
            backend.close()


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put instances into this process; the names of their requests are listed."""
    monkeypatch.setattr(fleet, "_Process", Local)
    Local.log.clear()
    return Local.log
