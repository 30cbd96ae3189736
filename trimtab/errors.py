"""The ways a run ends early on purpose."""

from collections.abc import Iterator


def error_chain(error: BaseException | None, *, contexts: bool = True) -> Iterator[BaseException]:
    """An exception, then its cause, the cause of that and so on, each once: chains can be loops.

    `contexts`: where no cause was given, go on with the exception that was being handled.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (error.__context__ if contexts else None)


class Error(Exception):
    """What all of them are: whoever calls from Python catches this one."""


class UserError(Error):
    """A mistake its author can mend: shown as one line (what, where, what to do), exit code 2."""


class CannotWrite(UserError):
    """The disk is full, gone or not ours: what is in memory may still be saved elsewhere."""


class Interrupted(Error):
    """The user or the scheduler asked us to stop; everything needed to go on is on disk."""

    def __init__(self, signal_number: int, message: str):
        super().__init__(message)
        self.exit_code = 128 + signal_number


class RunFailed(Error):
    """Training itself went wrong and stopped before doing more harm: shown as one line, exit code 1."""


class OutOfMemory(Error):
    """A pass did not fit into memory. Nothing of the step it belongs to is left, so the step can be begun anew."""
