"""The built-in engine on a policy that FSDP2 has split over two processes."""

import functools
import os
import pickle

import numpy as np
import pytest
import torch

from tests import warm
from tests.rollout.test_builtin_engine import policy_of, prompts
from tests.samples import random_examples
from trimtab.data.batches import TokenBatch
from trimtab.distributed.device import find_device
from trimtab.distributed.fsdp import shard
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.process_group import find_world, leave_world
from trimtab.models.parallel.sharded_model import decoder_layers
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.sampling import SamplingParams

LENGTHS = (5, 17, 33, 16, 1, 48, 7)
SHARES = [slice(0, 6), slice(6, 7)]  # very different numbers of passes


def answers_and_steps(policy, int8: bool, share=slice(None)) -> list:
    """Answers before the first step, and after each of two: (tokens, log-probs) of this process's prompts."""
    engine = BuiltinEngine(policy, max_num_seqs=4, weight_only_int8=int8)
    optimiser = torch.optim.SGD(policy.parameters(), lr=0.05)
    seen = []
    for step in range(3):
        # In the middle one process has nothing to do at all.
        own = slice(7, 7) if step == 1 and share == SHARES[1] else share
        rollouts = engine.generate(prompts(LENGTHS)[own], SamplingParams(max_new_tokens=12), seeds=list(range(7))[own])
        seen.append([(r.ids, r.log_probs) for r in rollouts])
        policy.train()
        policy(TokenBatch.of(random_examples([9, 5]))).log_probs_N.mean().neg().backward()
        optimiser.step()
        optimiser.zero_grad()
    return seen


def in_one_of_two(out, stage, int8):
    world = find_world(find_device())
    policy = policy_of()
    mesh = Mesh(world, replicate=2 if stage == 0 else 1)
    shard(policy, decoder_layers(policy), mesh, zero_stage=stage)
    seen = answers_and_steps(policy, int8, SHARES[world.rank])
    (out / f"{world.rank}").write_bytes(pickle.dumps(seen))
    leave_world()
    os._exit(0)  # nothing else to run


@pytest.mark.parametrize(("stage", "int8"), [(0, False), (2, False), (3, False), (3, True)])
def test_two_processes_answer_as_one_and_go_on_training(tmp_path, stage, int8):
    job = functools.partial(in_one_of_two, tmp_path, stage, int8)
    assert warm.run_world([], 2, prepare={0: job, 1: job}) == [0, 0]
    expected = answers_and_steps(policy_of(), int8)
    assert len({str([ids for ids, _ in answers]) for answers in expected}) == 3  # the steps change the answers
    for rank, share in enumerate(SHARES):
        seen = pickle.loads((tmp_path / f"{rank}").read_bytes())
        for step in (0, 2):
            assert [ids for ids, _ in seen[step]] == [ids for ids, _ in expected[step][share]]
            for (_, own), (_, one) in zip(seen[step], expected[step][share]):
                np.testing.assert_allclose(own, one, atol=1e-4)
