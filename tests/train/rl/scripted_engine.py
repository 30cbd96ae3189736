"""An engine that answers by a script: how long every answer is, and how many are written at once."""

import random
import threading
import time

import numpy as np

from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory


def length_of(seed: int, sample: int, most: int) -> int:
    return random.Random(1000 * seed + sample).randint(1, most)


class ScriptedEngine:
    """Token k of a sample is k + 100 x sample, its log-prob the version; it ends at its length."""

    exact = batch_invariant = False

    def __init__(self, max_num_seqs=5, seconds=0.0):
        self.max_num_seqs, self.seconds, self.version = max_num_seqs, seconds, 0
        self.at_work: ScriptedSession | None = None
        self.sessions = self.rests = self.steps = 0
        self.stuck: threading.Event | None = None  # for which it waits before its next token
        self.hangs = False
        self.fails: Exception | None = None

    def session(self, sampling: SamplingParams) -> "ScriptedSession":
        assert self.at_work is None
        self.sessions += 1
        self.at_work = ScriptedSession(self, sampling)
        return self.at_work

    def weights_changed(self, version: int) -> None:
        assert self.at_work is None
        self.version = version

    def trim_memory(self) -> None:
        assert self.at_work is None
        self.rests += 1

    def close(self) -> None:
        pass


class ScriptedSession:
    def __init__(self, engine, sampling):
        self.engine, self.sampling = engine, sampling
        self.requests, self.running, self.aborted = 0, [], set()

    def add(self, prompt_ids, *, seed=None, limit=None, partials=None, task=None):
        fresh = [Trajectory.empty(sample) for sample in range(self.sampling.n)]
        for draft in fresh if partials is None else partials:
            assert draft.finish is None
            length = length_of(seed, draft.sample, self.sampling.max_new_tokens)
            versions, log_probs = draft.versions.tolist(), draft.log_probs.tolist()
            self.running.append((self.requests, prompt_ids, draft.sample, list(draft.ids), log_probs, versions, length))
        self.requests += 1
        return self.requests - 1

    def expect(self, samples): ...

    @property
    def has_unfinished(self):
        return bool(self.running)

    def step(self, steps=None):
        if self.aborted:
            gone = [one for one in self.running if one[0] in self.aborted]
            self.running = [one for one in self.running if one[0] not in self.aborted]
            self.aborted = set()
            return [self._rollout(one, "abort") for one in gone]
        if self.engine.stuck is not None:
            self.engine.hangs = True
            self.engine.stuck.wait(30)
        if self.engine.fails is not None:
            raise self.engine.fails
        self.engine.steps += 1
        time.sleep(self.engine.seconds)
        finished = []
        for one in self.running[: self.engine.max_num_seqs]:
            _, _, sample, ids, log_probs, versions, length = one
            ids.append(len(ids) + 100 * sample)
            log_probs.append(float(self.engine.version))
            versions.append(self.engine.version)
            if len(ids) == length:
                finished.append(one)
        self.running = [one for one in self.running if one not in finished]
        return [self._rollout(one, "stop") for one in finished]

    def _rollout(self, one, finish):
        request, prompt_ids, sample, ids, log_probs, versions, _ = one
        log_probs, versions = np.array(log_probs, dtype=np.float32), np.array(versions, dtype=np.int32)
        return Trajectory(request, sample, prompt_ids, ids, log_probs, finish, versions=versions)

    def output_lengths(self):
        return {(one[0], one[2]): len(one[3]) for one in list(self.running)}

    def partials(self):
        found = {}
        for request, _, sample, ids, log_probs, versions, _ in list(self.running):
            count = len(versions)  # the last to grow
            drawn, by = np.array(log_probs[:count], dtype=np.float32), np.array(versions[:count], dtype=np.int32)
            found.setdefault(request, []).append(Trajectory(0, sample, [], ids[:count], drawn, versions=by))
        return found

    def abort(self, requests=None):
        self.aborted |= set(range(self.requests) if requests is None else requests)

    def close(self):
        self.engine.at_work = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
