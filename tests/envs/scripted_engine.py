"""An engine that says what it is told, whatever the model would: for worlds that wait for certain words."""

from collections.abc import Callable

import numpy as np

from trimtab.rollout.trajectory import Trajectory


class ScriptedSession:
    full = False

    def __init__(self, engine):
        self.engine, self.requests, self._asked = engine, 0, {}

    def add(self, prompt_ids, *, seed=None, limit=None, partials=None, task=None, sampling=None):
        self._asked[self.requests] = prompt_ids
        self.requests += 1
        return self.requests - 1

    def expect(self, samples): ...

    @property
    def has_unfinished(self):
        return bool(self._asked)

    def step(self, steps=None):
        asked, self._asked = self._asked, {}
        return [self._answer(number, ids) for number, ids in asked.items()]

    def _answer(self, number, prompt_ids):
        tokenizer = self.engine.tokenizer
        ids = tokenizer.encode(self.engine.say(tokenizer.decode(prompt_ids)) + tokenizer.eos_token)
        versions = np.zeros(len(ids), dtype=np.int32)
        return Trajectory(number, 0, prompt_ids, ids, np.zeros(len(ids), np.float32), "stop", versions=versions)

    def partials(self):
        return {number: [Trajectory.empty(0)] for number in self._asked}

    def output_lengths(self):
        return {(number, 0): 0 for number in self._asked}

    def abort(self, requests=None):
        for number in list(self._asked) if requests is None else requests:
            self._asked.pop(number, None)

    def close(self):
        self._asked.clear()


class ScriptedEngine:
    exact, batch_invariant, version, context = True, False, 0, 4096

    def __init__(self, tokenizer, say: Callable[[str], str]):
        """`say`: the answer to a text."""
        self.tokenizer, self.say = tokenizer, say

    def session(self, sampling):
        return ScriptedSession(self)
