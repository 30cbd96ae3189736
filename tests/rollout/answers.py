"""What answers of an engine are compared with, and what stands for a device's recordings."""

import numpy as np
import torch

from trimtab.data.batches import TokenBatch
from trimtab.rollout.sampling import SamplingParams


def trained_log_probs(policy, answers, temperature=1.0) -> torch.Tensor:
    """The trainer's, of all tokens of these answers."""
    whole = [np.array(a.prompt_ids + a.ids) for a in answers]
    batch = TokenBatch.of([(ids, np.arange(len(ids)) >= len(a.prompt_ids)) for ids, a in zip(whole, answers)])
    with torch.no_grad():
        return policy(batch.to(policy.device), temperature=temperature).log_probs_N.cpu()


def sampled_log_probs(answers, name="log_probs") -> torch.Tensor:
    return torch.from_numpy(np.concatenate([getattr(a, name) for a in answers]))


def check_log_probs(policy, answers, temperature=1.0, name="log_probs") -> None:
    """That they are the trainer's."""
    expected = trained_log_probs(policy, answers, temperature)
    torch.testing.assert_close(sampled_log_probs(answers, name), expected, atol=1e-5, rtol=1e-5)


def ids_of(answers) -> list[list[int]]:
    return [a.ids for a in answers]


def fill_adapters(model, spread) -> None:
    """So that they change what the model says."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=spread)


def converse(engine, texts) -> list:
    """All answers of conversations, each of which goes on until its text is long."""
    found = []
    with engine.session(SamplingParams(max_new_tokens=5)) as session:
        for number, ids in enumerate(texts):
            session.add(ids, seed=number)
        for rollout in session:
            found.append(rollout)
            if len(rollout.prompt_ids) < 30:
                session.add(rollout.prompt_ids + rollout.ids + [7, 8, 9][: 1 + rollout.prompt % 3], seed=3)
    assert len(found) > 10
    return found


class DoneAgain:
    """A recording, which is replayed by doing the work again."""

    def __init__(self, work, pool):
        work()
        self.replay, self.pool = work, lambda: None
