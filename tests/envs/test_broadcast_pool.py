"""Episodes of a policy whose layers are cut over two processes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from tests import warm
from tests.data.templates import CHATML
from tests.envs.chat_templates import tokenizer_of
from tests.envs.episodes import CONTEXT, VOCABULARY, make_policy, play, player
from tests.envs.fake_pool import Counting, Pool, failing
from tests.rollout.test_tensor_processes import shared_policy
from trimtab.distributed.process_group import leave_world
from trimtab.envs.environment_engine import EnvironmentEngine
from trimtab.envs.environment_pool import BroadcastPool
from trimtab.errors import RunFailed, UserError
from trimtab.rollout.builtin.engine import BuiltinEngine


def faulty():
    """Broken once, in a step."""
    return Pool(slow=1, fault=failing(1, lambda what, instance, _: what == "step" and instance.task.sample == 1))


def cut_over_two() -> None:
    policy, mesh = shared_policy("llama", vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    tokenizer = tokenizer_of(CHATML)
    inner = BuiltinEngine(policy, tokenizer, max_num_seqs=4, page_size=8, tensor=mesh.tensor)
    found = play(EnvironmentEngine(inner, BroadcastPool(faulty, mesh.tensor), tokenizer), n=2)
    expected = play(player(make_policy(), faulty()), n=2)
    for one, other in zip(found, expected, strict=True):
        assert (one.prompt, one.sample, one.ids, one.finish) == (other.prompt, other.sample, other.ids, other.finish)
        assert one.episode.begun == other.episode.begun and one.episode.reward == other.episode.reward
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=2e-5, rtol=0)
    leave_world()


@pytest.mark.long
def test_processes_that_share_every_layer_play_the_episodes_of_one():
    assert warm.call_world(cut_over_two, 2) == [0, 0]


class Pair:
    """Two threads in the place of two processes."""

    def __init__(self):
        self.barrier, self.told = threading.Barrier(2, timeout=5), [None, None]

    def __getitem__(self, rank):
        def gather(value):
            self.barrier.wait()
            self.told[rank] = value
            self.barrier.wait()
            return list(self.told)

        return SimpleNamespace(is_rank_zero=rank == 0, gather=gather)


def in_both(work):
    pair = Pair()
    with ThreadPoolExecutor(2) as threads:
        return [future.exception() for future in [threads.submit(work, pair[rank]) for rank in range(2)]]


def test_who_has_no_environments_hears_at_once_that_they_cannot_be_opened():
    words = "--environment gem:x: there is no such name"

    def refused():
        raise UserError(words)

    errors = in_both(lambda peers: BroadcastPool(refused, peers))
    assert [(type(error), str(error)) for error in errors] == [(UserError, words)] * 2


def test_who_has_no_environments_hears_at_once_that_they_have_failed():
    def fail(seconds):
        raise RuntimeError("the workers are gone")

    def work(peers):
        pool = BroadcastPool(lambda: Pool(Counting), peers)
        if peers.is_rank_zero:
            pool._pool.poll = fail
        pool.poll(0.0)

    first, other = in_both(work)
    assert (type(first), type(other), str(other)) == (RuntimeError, RunFailed, "the workers are gone")
