"""The errors a user can cause, each with the exit code of the command line.

A message is one line: what was given, what is allowed, what to do.
"""

_LONGEST = 3_000


class VtkError(Exception):
    """Base of every error that the toolkit raises on purpose; messages are cut at 3,000 characters."""

    exit_code = 1

    def __str__(self) -> str:
        text = super().__str__()
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


class UsageError(VtkError, ValueError):
    """An argument is wrong or two arguments contradict each other."""

    exit_code = 2


class DataError(VtkError):
    """A file, a folder of images or a pack cannot be used as it is."""

    exit_code = 3


class NoResultError(DataError):
    """A measurement has no result on these images: they are too few for it, or its numbers are not finite."""


class HeldError(DataError):
    """Another process is writing to the same place."""


class BaseError(DataError):
    """The base weights of a pack were not found, or are not those it was trained on."""


class VerificationError(VtkError):
    """An artefact failed verification and was not kept."""

    exit_code = 4


class StoppedError(VtkError):
    """A signal ended a run, which saved its state.

    Args:
        line: what was saved, and how to resume.
        signal: its number; the exit code is 128 + number, as in shells: 130 for Ctrl-C, 143 for SIGTERM.
    """

    def __init__(self, line: str, signal: int) -> None:
        super().__init__(line)
        self.exit_code = 128 + signal


class UnavailableError(VtkError):
    """A requested device, back-end or optional package is not available."""

    exit_code = 5
