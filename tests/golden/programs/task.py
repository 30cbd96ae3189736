"""A reward that can end the run it belongs to: GOLDEN_STOP="SIGTERM call 3" sends that signal at the third call."""

import os
import signal


def count_call() -> None:
    """May be called in several threads and processes: what counts is where a call's own dot stands in the file."""
    name, kind, number = os.environ.get("GOLDEN_STOP", "none none 0").split()
    if kind != "call":
        return
    with open(os.environ["GOLDEN_CALLS"], "a") as calls:
        calls.write(".")
        calls.flush()
        count = calls.tell()
    if count == int(number):
        os.kill(int(os.environ["GOLDEN_PID"]), getattr(signal, name))


def reward(prompts, completions, **columns):
    count_call()
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(sum(map(ord, text)) % 5) / 4 for text in texts]
