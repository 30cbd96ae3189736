"""Engines apart from the policy without vLLM: the built-in one with weights of its own, sent to it over links.

What a run on Ray does with such engines is the same whichever they are, so it is tested with these, which start in a
moment and write as slowly as a test wants. tests/vllm does the same with real ones.
"""

import os
import time
from pathlib import Path

import torch

from trimtab.config.rl_jobs import RLOptions
from trimtab.distributed.launcher import RoleContext
from trimtab.distributed.weight_transfer import TransferChannel, TransferPlan, describe_receiver, join_as_receiver
from trimtab.models.load import load_policy
from trimtab.rewards.build import non_model_rewards
from trimtab.rollout.builtin.engine import BuiltinEngine, BuiltinSession
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.launch import load_job_tokenizer
from trimtab.train.rl import roles
from trimtab.train.rl.async_worker import ThreadedRolloutWorker

ON_RAY = "--ray --vllm_num_engines 2 --rollout_engine vllm"


class EngineApart(BuiltinEngine):
    _link: TransferChannel | None = None
    seconds = 0.0
    """That every token takes."""
    notes: Path | None = None
    """A folder with a file for every engine, named by its process; it hangs as long as "hang" stands in its file."""

    def session(self, sampling: SamplingParams) -> BuiltinSession:
        session = super().session(sampling)
        plain = session.step

        def step(steps: int | None = None) -> list[Trajectory]:
            time.sleep(self.seconds)
            while self.notes is not None and (self.notes / str(os.getpid())).read_text() == "hang":
                time.sleep(0.05)
            return plain(1 if self.seconds else steps)

        session.step = step  # type: ignore[method-assign]
        return session

    def receivers(self) -> list[dict]:
        return [describe_receiver(torch.device("cpu"))]

    def connect(self, plan: TransferPlan) -> None:
        if self._link is not None:
            self._link.close()
        self._link = join_as_receiver(plan, torch.device("cpu"))

    @torch.no_grad()
    def receive_weights(self, version: int) -> None:
        assert self._link is not None
        parameters = dict(self.policy.inner.named_parameters())
        with self._link.receiving() as tensors:
            for name, tensor in tensors:
                parameters[name].copy_(tensor)
        self.weights_changed(version)


def without_vllm() -> None:
    """In the process of the command: it need not be installed."""
    from trimtab.config import resolved_config as support

    support.find_spec = lambda module: True


def build_engines_apart(seconds: float, notes: Path | None = None) -> None:
    """In a worker: what it builds for an engine. `seconds`: that each token of an answer takes."""

    def build(options: RLOptions, place: RoleContext) -> dict:
        tokenizer = load_job_tokenizer(options)
        policy = load_policy(options, place.device, place.mesh).model
        engine = EngineApart(policy, tokenizer, max_num_seqs=options.rollout_slots)
        engine.exact, engine.seconds, engine.notes = False, seconds, notes
        if notes is not None:
            (notes / str(os.getpid())).write_text("built")
        rewards = non_model_rewards(options, place.stop.requested)
        return {"rollouts": ThreadedRolloutWorker(engine, rewards, tokenizer, place.stop.requested)}

    roles.build_engine_rollouts = build
