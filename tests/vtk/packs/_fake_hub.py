"""The Hugging Face hub in memory. Calls are checked against the real client's signatures, so that one which the client
would not take fails here too."""

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.hf_api import RepoUrl
from huggingface_hub.utils import filter_repo_objects, hf_raise_for_status

http = importlib.import_module(huggingface_hub.errors.HTTPError.__module__.split(".")[0])  # httpx, in some version


def refusal(status: int, code: str = "", said: str = "") -> Callable[..., Any]:
    """Return a call that fails as the client does when the hub answers so."""

    def call(*_: Any, **__: Any) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": said}
        url = "https://huggingface.co/api/models/me/pets"
        hf_raise_for_status(http.Response(status, headers=headers, request=http.Request("GET", url)))

    return call


def raising(error: Exception) -> Callable[..., Any]:
    """Return a call that raises ``error``."""

    def call(*_: Any, **__: Any) -> None:
        raise error

    return call


@dataclasses.dataclass
class Repo:
    private: bool
    branches: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=lambda: {"main": {".gitattributes": b""}})
    commits: int = 0


class FakeHub:
    """Repositories by name; the tokens of all calls, in order; what is raised in place of an answer, if anything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.repos: dict[str, Repo] = {}
        self.tokens: list[str | None] = []
        self.failure: Callable[..., Any] | None = None
        names = ("create_repo", "create_branch", "model_info", "create_commit")
        self.api = SimpleNamespace(**{name: self._like(getattr(HfApi, name), getattr(self, name)) for name in names})
        monkeypatch.setattr(huggingface_hub, "HfApi", self._like(HfApi, self._client))
        download = self._like(huggingface_hub.snapshot_download, self._download)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        monkeypatch.setattr("vtk.models.weights.hub.reachable", lambda endpoint: True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def _like(self, real: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``fake``, taking what ``real`` takes; ``failure`` is called in its place."""
        parameters = [p for p in inspect.signature(real).parameters.values() if p.name != "self"]
        signature = inspect.Signature(parameters)

        def call(*args: Any, **kwargs: Any) -> Any:
            signature.bind(*args, **kwargs)
            return (fake if self.failure is None or fake == self._client else self.failure)(*args, **kwargs)

        return call

    def files(self, repo_id: str, revision: str | None = None) -> dict[str, bytes]:
        return self.repos[repo_id].branches[revision or "main"]

    def _client(self, *, token: str | None = None, **_: Any) -> Any:
        self.tokens.append(token)
        return self.api

    def create_repo(self, repo_id: str, *, private: bool | None = None, exist_ok: bool = False) -> RepoUrl:
        repo_id = repo_id if "/" in repo_id else f"me/{repo_id}"
        assert exist_ok or repo_id not in self.repos
        self.repos.setdefault(repo_id, Repo(bool(private)))
        return RepoUrl(f"https://huggingface.co/{repo_id}")

    def create_branch(self, repo_id: str, *, branch: str, exist_ok: bool = False) -> None:
        branches = self.repos[repo_id].branches
        assert exist_ok or branch not in branches
        branches.setdefault(branch, dict(branches["main"]))

    def model_info(self, repo_id: str, *, revision: str | None = None) -> Any:
        names = [SimpleNamespace(rfilename=name) for name in self.files(repo_id, revision)]
        return SimpleNamespace(private=self.repos[repo_id].private, siblings=names)

    def create_commit(
        self, repo_id: str, operations: list[Any], *, commit_message: str, revision: str | None = None
    ) -> Any:
        assert commit_message
        files = self.files(repo_id, revision)
        for operation in operations:
            if isinstance(operation, CommitOperationAdd):
                files[operation.path_in_repo] = Path(str(operation.path_or_fileobj)).read_bytes()
            else:
                assert isinstance(operation, CommitOperationDelete)
                del files[operation.path_in_repo]
        self.repos[repo_id].commits += 1
        return SimpleNamespace(oid=f"{self.repos[repo_id].commits:040x}")

    def _download(
        self, repo_id: str, *, revision: str | None, local_dir: Path, allow_patterns: list[str], token: str | None,
        **_: Any,
    ) -> str:  # fmt: skip
        self.tokens.append(token)
        if repo_id not in self.repos:
            refusal(404, "RepoNotFound")()
        if (revision or "main") not in self.repos[repo_id].branches:
            refusal(404, "RevisionNotFound")()
        files = self.files(repo_id, revision)
        (local_dir / ".cache" / "huggingface").mkdir(parents=True)  # the client's own notes
        for name in filter_repo_objects(files, allow_patterns=allow_patterns):
            (local_dir / name).parent.mkdir(parents=True, exist_ok=True)
            (local_dir / name).write_bytes(files[name])
        return str(local_dir)
