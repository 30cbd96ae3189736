"""Everything that the toy model of bad words may say: 40,000 answers of two words, so that nothing has to be sampled.

A policy is the log-probability of every answer. Reward, KL, P(bad) and CVaR are sums over them, and the best policy for
a weight of the KL is known in closed form:

    argmax E_p[r] - weight KL(p || p0)    =    p0 exp(r / weight) / Z

What a method reaches by sampling can be held against that. In double precision, since P(bad) may be 1e-30.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from trimtab.data.tokenizer import texts_of
from trimtab.embedded.bad_word_task import PROMPT

BAD = 0.0  # rewards below it


@dataclass(frozen=True)
class Outcome:
    reward: float
    kl: float
    """From the model as it was, of a whole answer, in nats."""
    log_bad: float
    """Natural logarithm of P(reward < 0)."""
    cvar_1: float
    """Mean reward of the worst 1 % of answers."""
    cvar_01: float
    """The same of 0.1 %."""


class World:
    def __init__(self, task: Path):
        """`task`: what trimtab.embedded.bad_word_task wrote."""
        self.tokenizer = AutoTokenizer.from_pretrained(task / "model")
        self.start_A = self.log_probs(task / "model")
        self.rewards_A = self._rewards(task / "reward.py")

    def log_probs(self, folder: Path) -> Tensor:
        """What the model in the folder says of every answer: two tokens, or the end alone."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        tokens = torch.arange(model.config.vocab_size)
        prompt = self.tokenizer(PROMPT, return_tensors="pt").input_ids[0]
        with torch.no_grad():
            logits = model(torch.cat([prompt.expand(len(tokens), -1), tokens[:, None]], dim=1)).logits
        first, second = logits[0, -2].log_softmax(-1), logits[:, -1].log_softmax(-1)
        goes_on = tokens != self.tokenizer.eos_token_id
        both = first[goes_on, None] + second[goes_on]
        return torch.cat([both.flatten(), first[~goes_on]])

    def _rewards(self, path: Path) -> Tensor:
        specification = importlib.util.spec_from_file_location("reward", path)
        assert specification is not None and specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        end, size = self.tokenizer.eos_token_id, len(self.tokenizer)
        # As a reward sees them: without the token that ended them.
        said = [[a, b] if b != end else [a] for a in range(size) if a != end for b in range(size)] + [[]]
        texts = [PROMPT + text for text in texts_of(self.tokenizer, said)]
        rewards = module.reward_func(texts, [PROMPT] * len(texts), [None] * len(texts))
        return torch.tensor(rewards, dtype=torch.float64)

    def outcome(self, log_probs_A: Tensor) -> Outcome:
        probabilities_A = log_probs_A.exp()
        # An answer that became impossible adds nothing, where 0 times infinity would be no number.
        ratio_A = torch.where(probabilities_A > 0, log_probs_A - self.start_A, 0.0)
        return Outcome(
            reward=float((probabilities_A * self.rewards_A).sum()),
            kl=float((probabilities_A * ratio_A).sum()),
            log_bad=float(log_probs_A[self.rewards_A < BAD].logsumexp(0)),
            cvar_1=self.cvar(probabilities_A, 0.01),
            cvar_01=self.cvar(probabilities_A, 0.001),
        )

    def cvar(self, probabilities_A: Tensor, level: float) -> float:
        """The mean reward of the worst answers that have this much probability together; the last counts in part."""
        rewards_A, order = self.rewards_A.sort()
        before_A = probabilities_A[order].cumsum(0) - probabilities_A[order]
        taken_A = torch.minimum(probabilities_A[order], (level - before_A).clamp(min=0))
        return float((taken_A * rewards_A).sum() / taken_A.sum())

    def best(self, weight: float) -> Outcome:
        """Of the policy with the highest E r - weight KL."""
        tilted_A = self.start_A + self.rewards_A / weight
        return self.outcome(tilted_A - tilted_A.logsumexp(0))
