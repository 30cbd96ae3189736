"""Episodes of a policy whose layers are cut over two processes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from tests import warm
from tests.data.templates import CHATML
from tests.envs.chat_templates import tokenizer_of
from tests.envs.episodes import CONTEXT, VOCABULARY, make_policy, play, player
from tests.envs.fake_pool import Counting, Fault, Pool
from tests.tiny import tiny_model
from trimtab.distributed.device import find_device
from trimtab.distributed.fsdp import shard
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.process_group import find_world, leave_world
from trimtab.envs.environment_engine import EnvironmentEngine
from trimtab.envs.environment_pool import BroadcastPool
from trimtab.errors import RunFailed, UserError
from trimtab.models.parallel.sharded_model import decoder_layers
from trimtab.models.parallel.tensor_parallel import apply_tensor_parallel
from trimtab.models.policy import Policy
from trimtab.rollout.builtin.engine import BuiltinEngine


def faulty():
    """Broken once, in a step."""
    seen = []

    def once(what, instance):
        if what == "step" and instance.task.sample == 1 and not seen:
            seen.append(instance)
            raise Fault("boom")

    return Pool(Counting, slow=1, fault=once)


def cut_over_two() -> None:
    mesh = Mesh(find_world(find_device()), tensor=2)
    policy = Policy(tiny_model("llama", vocab_size=VOCABULARY, max_position_embeddings=CONTEXT))
    apply_tensor_parallel(policy, mesh.for_tensor_parallel())
    shard(policy, decoder_layers(policy), mesh, zero_stage=3)
    tokenizer = tokenizer_of(CHATML)
    inner = BuiltinEngine(policy, tokenizer, max_num_seqs=4, page_size=8, tensor=mesh.tensor)
    found = play(EnvironmentEngine(inner, BroadcastPool(faulty, mesh.tensor), tokenizer), n=2)
    expected = play(player(make_policy(), faulty()), n=2)
    for one, other in zip(found, expected, strict=True):
        assert (one.prompt, one.sample, one.ids, one.finish) == (other.prompt, other.sample, other.ids, other.finish)
        assert one.episode.begun == other.episode.begun and one.episode.reward == other.episode.reward
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=2e-5, rtol=0)
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
