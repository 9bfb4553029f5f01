"""Turns the errors of the Hugging Face hub's client into one line that says what to do."""

import contextlib
from collections.abc import Iterator
from typing import Any

from vtk.errors import DataError, UnavailableError, UsageError, VtkError
from vtk.packages import importing
from vtk.readers import short

_TRANSPORT = ("httpx", "httpx2", "httpcore", "requests", "urllib3", "hf_xet")
_UNEXPECTED = (LookupError, TypeError, AttributeError, AssertionError, EOFError, RecursionError)
"""Exceptions of the hub's client for JSON of an unexpected form."""
_LOGIN = "log in (`hf auth login`), or set HF_TOKEN or `--token-env`"


def client() -> Any:
    """Return the module huggingface_hub.

    Raises:
        UnavailableError: it is not installed.
    """
    with importing("huggingface_hub is not installed; `pip install huggingface_hub`"):
        import huggingface_hub
    return huggingface_hub


def check_repo_id(repo_id: str) -> None:
    """Refuse a text that cannot be the name of a repository on the hub.

    Raises:
        UsageError: describes valid names.
    """
    hub = client()
    try:
        hub.utils.validate_repo_id(repo_id)
    except hub.errors.HFValidationError as error:
        raise UsageError(
            f"`{repo_id}` is not a repository name; give USER/NAME of letters, digits, `-`, `_` and `.`, at most 96"
        ) from error


def check_online() -> None:
    """Refuse at once if the hub cannot be reached: its client would retry for almost a minute.

    Raises:
        UnavailableError: offline mode is on, or the hub's name has no address here.
    """
    from vtk.models.weights.hub import reachable

    constants = client().constants
    if constants.HF_HUB_OFFLINE:
        raise UnavailableError(_offline())
    if not reachable(constants.ENDPOINT):
        raise UnavailableError(_unreachable("its name has no address here"))


@contextlib.contextmanager
def translate_errors(repo_id: str, revision: str | None = None) -> Iterator[None]:
    """Turn exceptions of the hub's client into one line; ``repo_id`` and ``revision`` are those requested.

    Raises:
        UnavailableError: no network, or offline mode.
        DataError: the hub refused, or has no such repository or revision.
    """
    try:
        yield
    except VtkError:
        raise
    except Exception as error:
        found = _explain(error, repo_id, revision)
        if found is None and not isinstance(error, _UNEXPECTED):
            raise
        if found is None:
            text = f"the hub's answer about {repo_id} cannot be used ({short(error)}); is HF_ENDPOINT a hub?"
            found = DataError(text)
        raise found from error


def _explain(error: BaseException, repo_id: str, revision: str | None) -> VtkError | None:
    kinds = client().errors
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, kinds.OfflineModeIsEnabled):
        return UnavailableError(_offline())
    if isinstance(error, kinds.GatedRepoError):
        return DataError(f"{repo_id} is gated: ask for access on its page, then {_LOGIN}")
    if isinstance(error, kinds.RevisionNotFoundError):
        return DataError(f"{repo_id} has no revision `{revision or 'main'}`; give one of its branches, tags or commits")
    if isinstance(error, kinds.RepositoryNotFoundError):
        return DataError(
            f"there is no model repository {repo_id} that you can read; check its name, or if it is private, {_LOGIN}"
        )
    if isinstance(error, kinds.LocalEntryNotFoundError):  # the client fell back to its cache; the cause is the reason
        cause = error.__cause__
        return (_explain(cause, repo_id, revision) if cause else None) or UnavailableError(_unreachable(_line(error)))
    if status == 401:
        return DataError(f"the hub requires a login (401); {_LOGIN}")
    if status == 403:
        return DataError(
            f"your token has no permission for this on {repo_id} (403); give a token with write access, or another name"
        )
    if isinstance(error, kinds.HfHubHTTPError):
        said = getattr(error, "server_message", None) or _line(error)
        return DataError(f"the hub refused {repo_id} ({status}): {' '.join(str(said).split())}")
    if isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.split(".")[0] in _TRANSPORT:
        return UnavailableError(_unreachable(_line(error)))
    if isinstance(error, ValueError):  # what the hub, or its client, says of the model card's metadata
        return DataError(f"the hub's client refused {repo_id}: {_line(error)}")
    if type(error) is RuntimeError:  # what the transfer of large files raises
        return DataError(f"the transfer of {repo_id} failed: {_line(error)}; try again")
    return None


def _offline() -> str:
    return "HF_HUB_OFFLINE is set, so the hub is not contacted; unset it"


def _unreachable(why: str) -> str:
    return f"the hub ({client().constants.ENDPOINT}) cannot be reached: {why}; check the network, or set HF_ENDPOINT"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
