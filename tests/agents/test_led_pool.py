"""Episodes of a policy whose layers are cut over two processes."""

import pytest
import torch

from tests import warm
from tests.agents.playing import CONTEXT, VOCABULARY, make_policy, play, player
from tests.agents.templates import tokenizer_of
from tests.agents.worlds import Counting, Fault, Pool
from tests.data.templates import CHATML
from tests.tiny import tiny_model
from trimtab.agents.engine import AgentEngine
from trimtab.agents.led_pool import LedPool
from trimtab.distributed.device import find_device
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.sharding import shard
from trimtab.distributed.world import find_world, leave_world
from trimtab.models.policy import Policy
from trimtab.models.sharded import decoder_layers
from trimtab.models.tensor_parallel import cut
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
    mesh = Mesh(world := find_world(find_device()), tensor=2)
    policy = Policy(tiny_model("llama", vocab_size=VOCABULARY, max_position_embeddings=CONTEXT))
    cut(policy, mesh.for_cutting())
    shard(policy, decoder_layers(policy), mesh, zero_stage=3)
    tokenizer, pool = tokenizer_of(CHATML), None if world.rank else faulty()
    inner = BuiltinEngine(policy, tokenizer, slots=4, page_size=8, tensor=mesh.tensor)
    found = play(AgentEngine(inner, LedPool(pool, mesh.tensor), tokenizer), n=2)
    expected = play(player(make_policy(), faulty()), n=2)
    for one, other in zip(found, expected, strict=True):
        assert (one.prompt, one.sample, one.ids, one.finish) == (other.prompt, other.sample, other.ids, other.finish)
        assert one.episode.begun == other.episode.begun and one.episode.reward == other.episode.reward
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=2e-5, rtol=0)
    leave_world()


@pytest.mark.long
def test_processes_that_share_every_layer_play_the_episodes_of_one():
    assert warm.call_world(cut_over_two, 2) == [0, 0]
