"""The errors a user can cause, each with the exit code of the command line.

A message is one line: what was given, what is allowed, what to do.
"""

_LONGEST = 3_000


class VtkError(Exception):
    """Base of every error this toolkit raises on purpose; what it quotes of a file does not make it endless."""

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


class HeldError(DataError):
    """Somebody else writes there now."""


class BaseError(DataError):
    """The base weights of a pack were not found, or they are not the ones it was trained on."""


class VerificationError(VtkError):
    """An artefact was built but does not do what it should; it was not kept."""

    exit_code = 4


class StoppedError(VtkError):
    """A signal ended a run, which saved what it had done.

    Args:
        line: what was done, and how to go on.
        signal: its number; the exit code is 128 more, as a shell has it: 130 of Ctrl-C, 143 of SIGTERM.
    """

    def __init__(self, line: str, signal: int) -> None:
        super().__init__(line)
        self.exit_code = 128 + signal


class UnavailableError(VtkError):
    """A device, back-end or optional package was asked for and is not here."""

    exit_code = 5
