"""Small learners, and how two of them are compared."""

import copy

import numpy as np
import torch

from tests.tiny import tiny_model
from trimtab.api.learner import Learner

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]


def learner(**options) -> Learner:
    """Of a module, without a tokenizer."""
    return Learner(tiny_model(), **{"bf16": False, "learning_rate": 1e-2} | options)


def judged(one: Learner, n: int = 4, **sampling) -> list:
    """Answers with advantages of their own at every token."""
    samples = one.sample(PROMPTS, n, **{"max_new_tokens": 6} | sampling)
    generator = np.random.default_rng(0)
    for sample in samples:
        sample.advantages = generator.normal(size=len(sample.log_probs)).astype(np.float32)
    return samples


def copied(samples: list) -> list:
    return copy.deepcopy(samples)


def weights(one: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in one._optimizer.state().items()}


def assert_same(first: dict, second: dict, **tolerance) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], **{"rtol": 0, "atol": 0} | tolerance, msg=name)
