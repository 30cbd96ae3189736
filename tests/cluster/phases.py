"""What the workers of a run are doing, noted as they begin it, so that a test can disturb a run in the middle of it."""

import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.cluster.machines import wait_until

PHASES = {  # what is done, in words: the call that does it
    "rollout": "rollouts.sample",
    "scoring": "reward.score",
    "update": "actor.update",
    "weight sync": "rollouts.weights_changed",
    "save": "actor.write_state",
}


class Doing(NamedTuple):
    address: str
    process: int
    call: str


def note_phases(notes: Path, lasts: float = 0.5) -> None:
    """In a worker: before each call of a role. `lasts`: seconds that a phase takes at least, so that it can be hit."""
    from trimtab.distributed.supervision import Heartbeat

    plain = Heartbeat.move
    address = next(word.partition("=")[2] for word in sys.argv if word.startswith("--node-ip-address="))

    def move(self, doing=None):
        plain(self, doing)
        if doing is not None and "." in doing:
            with notes.open("a") as opened:
                opened.write(f"{address} {os.getpid()} {doing}\n")
            if doing in PHASES.values():
                time.sleep(lasts)

    Heartbeat.move = move


def noted(notes: Path) -> list[Doing]:
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [Doing(address, int(process), call) for address, process, call in map(str.split, lines)]


def wait_for(notes: Path, phase: str, running, *, address: str | None = None, seconds: float = 120) -> Doing:
    """The next time that a process begins this phase (on a machine); `running` says whether the run still is."""
    seen = len(noted(notes))
    found: list[Doing] = []

    def begun() -> bool:
        assert running(), f"the run has ended before its next {phase}"
        found[:] = [
            doing for doing in noted(notes)[seen:] if doing.call == PHASES[phase] and address in (None, doing.address)
        ]
        return bool(found)

    wait_until(begun, seconds, lambda: f"no {phase} in {seconds:g} s", every=0.02)
    return found[-1]
