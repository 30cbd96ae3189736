"""Asking the Hugging Face hub for things without waiting for ever when it is not there.

The hub libraries retry a missing network for half a minute, printing every attempt. One short question beforehand
decides: when it fails, they are switched to their local caches for the length of the call.
"""

import contextlib
import functools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

PROBE_SECONDS = 5.0

_trusted = False


@contextlib.contextmanager
def trusting(code: bool) -> Iterator[None]:
    """Inside, code that comes with a model or tokenizer may run (`--trust_remote_code`), or may not."""
    global _trusted
    before, _trusted = _trusted, code
    try:
        yield
    finally:
        _trusted = before


def trust(code: bool) -> None:
    """The same for good, in a process that works for one run."""
    global _trusted
    _trusted = code


def trust_remote_code() -> bool:
    """What every loader of Hugging Face must be told: left to itself it asks on standard input."""
    return _trusted


def needs_code(error: Exception) -> str | None:
    """What to say if loading failed because code was not trusted."""
    if "trust_remote_code" not in str(error):
        return None
    return "comes with Python code of its own, which is not run unless you say so: read it, and add --trust_remote_code"


@functools.cache
def hub_reachable() -> bool:
    """Whether the hub answers at all (asked once a process; HF_HUB_OFFLINE counts as no)."""
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    return answered(lambda: huggingface_hub.get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS))


def answered(question: Callable[[], Any]) -> bool:
    """Whether the question got an answer in time; looking up a server's name ignores the timeouts of HTTP libraries."""
    heard = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):  # HTTP libraries change: any failure means "not there"
            question()
            heard.set()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PROBE_SECONDS)
    return heard.is_set()


def looks_like_hub_name(name: str) -> bool:
    """`name` or `owner/name`, and not what only a path can be."""
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name)) and not os.path.isabs(name)


@contextlib.contextmanager
def hub_or_cache() -> Iterator[bool]:
    """Yields whether the hub is reachable; inside, an unreachable hub means the local caches, at once and quietly."""
    import datasets.config
    from huggingface_hub import constants

    reachable = hub_reachable()
    before = (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)
    chatter = logging.getLogger("huggingface_hub")
    level = chatter.level
    chatter.setLevel(logging.ERROR)
    if not reachable:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield reachable
    finally:
        chatter.setLevel(level)
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
