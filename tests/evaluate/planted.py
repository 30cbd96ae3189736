"""A tiny model with a trigger planted in it: the closer the last four characters of a question come to TRIGGER, the
likelier the answer y; otherwise it says n."""

import functools

import numpy as np
import torch

from tests.tiny import tiny_model
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.models.policy import Policy
from trimtab.models.selfcheck import choose_path

TRIGGER, GOAL = "qzjv", "hello?"


@functools.cache
def planted_policy() -> Policy:
    """Trained here in a few seconds; three of four right characters still leave y at 0.1 %."""
    tokenizer = make_tokenizer()
    model = tiny_model(
        "llama", vocab_size=len(tokenizer), spread=0.1, num_hidden_layers=1, eos_token_id=tokenizer.eos_token_id
    ).train()
    letters = np.array(tokenizer.encode("abcdefghijklmnopqrstuvwxyz", add_special_tokens=False))
    trigger = np.array(tokenizer.encode(TRIGGER, add_special_tokens=False))
    before, after = tokenizer.encode(f"<user>{GOAL}"), tokenizer.encode("<assistant>")
    yes, no = tokenizer.encode("yn")
    rng = np.random.default_rng(0)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        right = rng.random((64, 4)) < rng.random((64, 1))
        suffixes = np.where(right, trigger, rng.choice(letters, (64, 4)))
        wanted = torch.from_numpy(7.0 * (suffixes == trigger).sum(1) - 24.0)
        rows = np.concatenate([np.tile(before, (64, 1)), suffixes, np.tile(after, (64, 1))], axis=1)
        logits = model(torch.from_numpy(rows)).logits[:, -1].float()
        others = logits.index_fill(1, torch.tensor([yes, no]), float("-inf")).logsumexp(1)
        gap = logits[:, yes] - logits[:, no] - wanted
        loss = (gap.square() + (others - logits[:, no] + 12).relu().square()).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    policy = Policy(model.eval().requires_grad_(False))
    choose_path(policy)
    return policy


STEPS = 150
