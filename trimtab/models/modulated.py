"""A policy times what a head on its hidden states has learnt: q is p psi, normalised over the vocabulary.

    modulation_linear_head    log psi = W h + b
    modulation_nn_head        three layers with ReLU between them
    modulation_model          W h + b of hidden states of a model of its own

The last layer begins at zero, so that q begins as p. The policy inside is the trained one itself; a model of its own
runs beside it, layer behind layer, so that an engine sees one model with twice the layers.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from trimtab.data.batches import TokenBatch
from trimtab.distributed.sharding import gathered
from trimtab.models.lm_head import token_log_probs
from trimtab.models.logits import PLAIN, LogitShape, shaped_logits
from trimtab.models.packed import PackedModel, scoring
from trimtab.models.policy import Policy, PolicyOutput


class Twist(nn.Module):
    """log psi from hidden states."""

    def __init__(self, width: int, vocabulary: int, *, layers: int):
        super().__init__()
        hidden = [part for _ in range(layers - 1) for part in (nn.Linear(width, width), nn.ReLU())]
        self.body, self.last = nn.Sequential(*hidden), nn.Linear(width, vocabulary)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """[N, V]"""
        return self.last(self.body(hidden_ND.to(self.last.weight.dtype))).float()

    def of(self, hidden_ND: Tensor, tokens_N: Tensor) -> Tensor:
        """[N], without the others."""
        body_ND = self.body(hidden_ND.to(self.last.weight.dtype)).float()
        return (body_ND * self.last.weight[tokens_N]).sum(-1) + self.last.bias[tokens_N]


class ModulatedHead(nn.Module):
    def __init__(self, policy: Policy, twist: Twist, *, beside: bool):
        """`beside`: the hidden states are the policy's and, beside them, those of a model that psi is read from."""
        super().__init__()
        self.policy, self.twist, self.beside = policy, twist, beside
        self.out_features = policy.head.out_features

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """Logits of q."""
        own_ND, twisting_ND = hidden_ND.chunk(2, -1) if self.beside else (hidden_ND, hidden_ND)
        return shaped_logits(self.policy.head(own_ND), self.policy.logit_shape, 1.0) + self.twist(twisting_ND)


class ModulatedPolicy(nn.Module):
    """What an engine and a learner know of a policy, with another head."""

    path = "packed"

    def __init__(self, policy: Policy, twist: Twist, psi: "TwistModel | None" = None):
        super().__init__()
        self.policy, self.twist, self.psi = policy, twist, psi
        self.head = ModulatedHead(policy, twist, beside=psi is not None)
        self._inner = [policy.inner if psi is None else SideBySide(policy.inner, psi.inner)]

    @property
    def model(self) -> Twist:
        """What is trained of it."""
        return self.twist

    @property
    def inner(self) -> nn.Module:
        return self._inner[0]

    @property
    def config(self):
        return self.policy.config

    @property
    def device(self) -> torch.device:
        return self.policy.device

    @property
    def logit_shape(self) -> LogitShape:
        return PLAIN  # the head has shaped the policy's own logits

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """With all weights. Every process must enter."""
        with gathered(self):
            yield

    def forward(self, batch: TokenBatch, *, temperature: float = 1.0) -> PolicyOutput:
        """Log-probs of the trained tokens; for scoring, inside `at_work`."""
        batch = self.policy.rotary.separate(batch)
        models = [self.policy] if self.psi is None else [self.policy, self.psi]
        hidden_ND = torch.cat([model.hidden(batch)[0][batch.predictors_N] for model in models], -1)
        log_probs_N, _ = token_log_probs(hidden_ND, self.head, batch.targets_N, temperature=temperature)
        return PolicyOutput(log_probs_N)

    def log_twists(self, batch: TokenBatch) -> Tensor:
        """log psi of the trained tokens; its gradient is the head's alone."""
        with scoring(self.policy):
            hidden_ND = self.policy(batch, hidden_only=True).hidden_ND
        return self.twist.of(hidden_ND, batch.targets_N)


class TwistModel(PackedModel):
    """A model of its own that psi is read from."""

    def __init__(self, policy: Policy):
        super().__init__(policy.model, policy.path)
        self.twist = twist_of(policy, layers=1)
        for parameter in policy.head.parameters():
            parameter.requires_grad_(any(parameter is p for p in policy.inner.base_model.parameters()))

    def forward(self, batch: TokenBatch) -> Tensor:
        """log psi of the trained tokens."""
        batch = self.rotary.separate(batch)
        return self.twist.of(self.hidden(batch)[0][batch.predictors_N], batch.targets_N)


class SideBySide(nn.Module):
    """Two models of one kind as one: hidden states beside each other, the second's layers run after the first's."""

    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.first, self.second = first, second
        self.config, self.generation_config = first.config, first.generation_config

    @property
    def base_model(self) -> nn.Module:
        return self

    def set_attn_implementation(self, name: str) -> None:
        for model in (self.first, self.second):
            model.set_attn_implementation(name)

    def forward(self, **inputs: Tensor) -> SimpleNamespace:
        states = [model.base_model(**inputs).last_hidden_state for model in (self.first, self.second)]
        return SimpleNamespace(last_hidden_state=torch.cat(states, -1))


def twist_of(policy: Policy, *, layers: int) -> Twist:
    """Fit for the policy's hidden states and vocabulary; in main memory while the policy is a skeleton."""
    twist = Twist(policy.config.get_text_config().hidden_size, policy.head.out_features, layers=layers)
    return twist if policy.device.type == "meta" else twist.to(policy.device)
