"""Processes of a run that are gone, and what Ray and PyTorch say of them in our words."""

from trimtab.errors import RunFailed

# What PyTorch says in a process whose neighbour has gone: a consequence, not a cause.
OF_ANOTHER = (
    *("connection closed by peer", "connection reset", "broken pipe", "timed out", "connection refused"),
    *("failed to recv", "failed to send", "socket closed", "no route to host", "distnetworkerror"),
)

# How Ray says of a process that its machine has gone with it.
OF_THE_NODE = ("node was terminated", "node has died", "node died", "missing too many heartbeats", "node failure")


class Lost(RunFailed):
    """A process of a run is gone. What the others hold cannot be gathered any more; checkpoints are what is left."""


class EngineLost(Lost):
    """One that only answers prompts: another can take its place."""

    def __init__(self, message: str, rank: int):
        super().__init__(message)
        self.rank = rank


def in_words(error: BaseException) -> str:
    """Why a call to a process of Ray failed."""
    name, said = type(error).__name__, " ".join(str(error).split())
    if any(words in said for words in OF_THE_NODE):
        why = "its node is gone"
    elif name == "ActorUnavailableError":
        why = "its process or its node is gone"
    elif name == "OutOfMemoryError":
        why = "Ray ended it, since its node was short of memory"
    elif name == "ActorDiedError" and "creation task" in said:
        why = f"it could not be started: {said[-300:]}"
    elif name == "ActorDiedError":
        why = "its process ended" + (" (killed, or out of memory)" if "SYSTEM_ERROR" in said else "")
    else:
        why = said[:300]
    return f"was lost: {why} ({name})"


def is_of_another(message: str) -> bool:
    """Whether a process failed only because another one has."""
    return any(words in message.lower() for words in OF_ANOTHER)
