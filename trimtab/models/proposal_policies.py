"""Proposal policies q for sampling rare answers, on the weights of the trained policy p.

SharedBasePolicy: a second policy on p's weights with its own adapters. In one process its parameters share p's memory.
If p is sharded they are empty, and refer to the gathered weights while it is used.

TwistedPolicy: q = p psi, normalized over the vocabulary, where psi is a head on hidden states:

    modulation_linear_head    log psi = W h + b
    modulation_nn_head        three layers with ReLU between them
    modulation_model          W h + b of the hidden states of a second model

The last layer is initialized with zeros, so that q starts as p. The second model's layers run after the policy's, so an
engine sees one model with twice the layers.
"""

import contextlib
import copy
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from trimtab.config.rl_jobs import RLOptions
from trimtab.data.batches import TokenBatch
from trimtab.distributed.device import Device
from trimtab.distributed.fsdp import gathered
from trimtab.models.lm_head import PLAIN, shaped_logits, token_log_probs
from trimtab.models.load import prepare_training
from trimtab.models.lora import add_adapters, without_adapters
from trimtab.models.packed import PackedModel, backbone_of, scoring, switch_off_dropout
from trimtab.models.policy import Policy, PolicyOutput
from trimtab.models.selfcheck import use_attention

Loan = tuple[nn.Parameter, nn.Module, str]
"""An empty parameter, and the owner's module and parameter name whose weights it uses."""


class SharedBasePolicy(Policy):
    """A policy on another policy's weights, with its own adapters."""

    def __init__(self, owner: Policy, options: RLOptions, device: Device, *, split: bool):
        """`owner`: the policy whose weights, without its adapters, are used; `options`: of the new adapters; `split`:
        the owner is sharded."""
        model, loans = _hollow(owner, options) if split else (_copy(owner), [])
        super().__init__(add_adapters(model, options), owner.path)
        if split:
            prepare_training(self, options, device)
        self._loans = loans
        self._give_back()
        # In a list, so that it is not registered as a submodule: the owner trains and saves its weights.
        self._owner = [owner]
        self.train()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Use the owner's gathered weights inside the context. Every process must enter."""
        if not self._loans:
            yield
            return
        with gathered(self._owner[0]):
            for parameter, module, name in self._loans:
                parameter.data = getattr(module, name).data
            try:
                yield
            finally:
                self._give_back()

    def _give_back(self) -> None:
        for parameter, *_ in self._loans:
            parameter.data = parameter.new_empty(0)


def _copy(owner: Policy) -> nn.Module:
    """A copy of the owner's modules without adapters, sharing its memory."""
    memo = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in owner.model.parameters()}
    model = copy.deepcopy(owner.model, memo | {id(buffer): buffer for buffer in owner.model.buffers()})
    return model.unload() if hasattr(model, "peft_config") else model


def _hollow(owner: Policy, options: RLOptions) -> tuple[nn.Module, list[Loan]]:
    """A copy of the owner's modules with empty parameters, and the weights each of them uses."""
    with torch.device("meta"):
        model = type(owner.inner)._from_config(copy.deepcopy(owner.config), dtype=torch.float32)
    use_attention(model, owner.config._attn_implementation)
    if not options.keep_dropout:
        switch_off_dropout(model)
    made: dict[int, nn.Parameter] = {}
    loans = []
    with without_adapters(owner.inner):
        for name, module in model.named_modules():
            theirs = owner.inner.get_submodule(name)
            module._buffers = dict(theirs._buffers)
            for leaf, parameter in module._parameters.items():
                if parameter is None:
                    continue
                # Tied as in the owner: files may have separate tensors although the configuration ties them.
                lent = id(getattr(theirs, leaf))
                if lent not in made:
                    hollow = torch.zeros((), device=owner.device).expand(parameter.shape)
                    made[lent] = nn.Parameter(hollow, requires_grad=False)
                    loans.append((made[lent], theirs, leaf))
                module._parameters[leaf] = made[lent]
    return model, loans


class Twist(nn.Module):
    """A head that computes log psi from hidden states."""

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
        """log psi of the given tokens [N], without computing the whole vocabulary."""
        body_ND = self.body(hidden_ND.to(self.last.weight.dtype)).float()
        return (body_ND * self.last.weight[tokens_N]).sum(-1) + self.last.bias[tokens_N]


class TwistedHead(nn.Module):
    """The output head of q: the policy's logits plus log psi."""

    def __init__(self, policy: Policy, twist: Twist, *, paired: bool):
        """`paired`: hidden states are those of the policy concatenated with those of the second model."""
        super().__init__()
        self.policy, self.twist, self.paired = policy, twist, paired
        self.out_features = policy.head.out_features

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """Logits of q."""
        own_ND, twisting_ND = hidden_ND.chunk(2, -1) if self.paired else (hidden_ND, hidden_ND)
        return shaped_logits(self.policy.head(own_ND), self.policy.logit_shape, 1.0) + self.twist(twisting_ND)


class TwistedPolicy(nn.Module):
    """A policy for engines and trainers with a twisted head."""

    path = "packed"
    logit_shape = PLAIN  # the head has already scaled the policy's logits
    at_work = Policy.at_work

    def __init__(self, policy: Policy, twist: Twist, psi: "TwistModel | None" = None):
        super().__init__()
        self.policy, self.twist, self.psi = policy, twist, psi
        self.head = TwistedHead(policy, twist, paired=psi is not None)
        self._inner = [policy.inner if psi is None else PairedModel(policy.inner, psi.inner)]

    @property
    def model(self) -> Twist:
        """Its trained part."""
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

    def forward(self, batch: TokenBatch, *, temperature: float = 1.0) -> PolicyOutput:
        """Log-probs of the trained tokens; for scoring, inside `at_work`."""
        batch = self.policy.rotary.separate(batch)
        models = [self.policy] if self.psi is None else [self.policy, self.psi]
        hidden_ND = torch.cat([model.hidden(batch)[0][batch.predictors_N] for model in models], -1)
        log_probs_N, _ = token_log_probs(hidden_ND, self.head, batch.targets_N, temperature=temperature)
        return PolicyOutput(log_probs_N)

    def log_twists(self, batch: TokenBatch) -> Tensor:
        """log psi of the trained tokens; only the head gets a gradient."""
        with scoring(self.policy):
            hidden_ND = self.policy(batch, hidden_only=True).hidden_ND
        return self.twist.of(hidden_ND, batch.targets_N)


class TwistModel(PackedModel):
    """The second model, whose hidden states give psi."""

    def __init__(self, policy: Policy):
        super().__init__(policy.model, policy.path)
        self.twist = twist_of(policy, layers=1)
        for parameter in policy.head.parameters():
            parameter.requires_grad_(any(parameter is p for p in backbone_of(policy.inner).parameters()))

    def forward(self, batch: TokenBatch) -> Tensor:
        """log psi of the trained tokens."""
        batch = self.rotary.separate(batch)
        return self.twist.of(self.hidden(batch)[0][batch.predictors_N], batch.targets_N)


class PairedModel(nn.Module):
    """Two models of one kind as one: hidden states are concatenated, and the second model runs after the first."""

    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.first, self.second = first, second
        self.config, self.generation_config = first.config, first.generation_config

    @property
    def base_model(self) -> nn.Module:
        """Its backbone: it has no head."""
        return self

    model = base_model

    def set_attn_implementation(self, name: str) -> None:
        for model in (self.first, self.second):
            model.set_attn_implementation(name)

    def forward(self, **inputs: Tensor) -> SimpleNamespace:
        states = [backbone_of(model)(**inputs).last_hidden_state for model in (self.first, self.second)]
        return SimpleNamespace(last_hidden_state=torch.cat(states, -1))


def twist_of(policy: Policy, *, layers: int) -> Twist:
    """A twist for the policy's hidden size and vocabulary; in main memory if the policy is on the meta device."""
    twist = Twist(policy.config.get_text_config().hidden_size, policy.head.out_features, layers=layers)
    return twist if policy.device.type == "meta" else twist.to(policy.device)
