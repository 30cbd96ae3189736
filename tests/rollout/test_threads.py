"""Two models in two threads of one process, taking turns inside their passes, give the numbers of each alone."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.rollout.test_builtin_engine import policy_of
from tests.samples import batch_of
from trimtab.config.jobs import SFTOptions
from trimtab.models import attention as packed
from trimtab.models.activation_memory import enable_gradient_checkpointing
from trimtab.rollout.builtin import attention as cached
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.sampling import SamplingParams

SAMPLING = SamplingParams(max_new_tokens=12, n=3, seed=1)


class Turns:
    """Two threads go on in turns; one that has ended hands its turns over."""

    def __init__(self) -> None:
        self.condition, self.turn, self.ended = threading.Condition(), 0, set()
        self.taken = 0

    def take(self, number: int) -> None:
        with self.condition:
            self.condition.wait_for(lambda: self.turn == number or 1 - number in self.ended, timeout=20)
            self.turn = 1 - number
            self.taken += 1
            self.condition.notify_all()

    def end(self, number: int) -> None:
        with self.condition:
            self.ended.add(number)
            self.condition.notify_all()


def in_turns(works, monkeypatch):
    """The results of two functions whose threads take turns at every layer's attention."""
    turns = Turns()
    mine = threading.local()

    def taking_turns(plain):
        def attention(*arguments, **options):
            if hasattr(mine, "number"):
                turns.take(mine.number)
            return plain(*arguments, **options)

        return attention

    monkeypatch.setattr(packed, "packed_attention", taking_turns(packed.packed_attention))
    monkeypatch.setattr(cached, "rollout_attention", taking_turns(cached.rollout_attention))
    packed.register()
    cached.register()

    def run(number):
        mine.number = number
        try:
            return works[number]()
        finally:
            turns.end(number)

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(run, range(2)))
    monkeypatch.undo()
    packed.register()
    cached.register()
    assert turns.taken >= 12
    return results


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_training_passes_of_two_models_do_not_meet(reentrant, monkeypatch):
    """Also where gradient checkpointing runs attention again in the backward pass."""

    def gradients(seed, lengths):
        policy = policy_of(seed=seed)  # not in the thread: drawing weights is not what is looked at

        def work():
            if reentrant is not None:
                enable_gradient_checkpointing(
                    policy, SFTOptions(gradient_checkpointing=True, gradient_checkpointing_use_reentrant=reentrant)
                )
                policy.train()
            for _ in range(3):
                policy(batch_of(lengths)).log_probs_N.sum().backward()
            return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}

        return work

    alone = [gradients(0, [9, 4, 17])(), gradients(1, [12, 18])()]
    works = gradients(0, [9, 4, 17]), gradients(1, [12, 18])
    for expected, found in zip(alone, in_turns(works, monkeypatch)):
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_two_engines_do_not_meet(monkeypatch):
    def answers(seed, lengths):
        policy = policy_of(seed=seed)

        def work():
            engine = BuiltinEngine(policy, kv_tokens=512, max_num_seqs=4)
            rollouts = engine.generate([[3 + i for i in range(length)] for length in lengths], SAMPLING)
            return [(r.prompt, r.sample, r.ids, r.log_probs.tolist()) for r in rollouts]

        return work

    works = answers(0, [5, 9, 2]), answers(1, [7, 3, 11, 4])
    alone = [work() for work in works]
    assert in_turns(works, monkeypatch) == alone


def test_two_streams_of_one_thread_do_not_meet():
    prompts = [[[5, 6, 7], [8, 9]], [[10, 11, 12, 13], [4]]]
    engines = [BuiltinEngine(policy_of(seed=seed), kv_tokens=512, max_num_seqs=2) for seed in (0, 1)]
    key = lambda r: (r.prompt, r.sample, r.ids, r.log_probs.tolist())  # noqa: E731
    alone = [sorted(map(key, e.stream(p, SAMPLING))) for e, p in zip(engines, prompts)]
    streams = [e.stream(p, SAMPLING) for e, p in zip(engines, prompts)]
    together = [sorted(map(key, found)) for found in zip(*zip(*streams))]
    assert together == alone
