"""A causal LM as a policy: log-probabilities of trained tokens, entropies, and divergence from a teacher."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from trimtab.data.batches import TokenBatch
from trimtab.distributed.fsdp import gathered, whole
from trimtab.errors import UserError
from trimtab.models.lm_head import LogitShape, choice_log_probs, shaped_logits, token_divergence, token_log_probs
from trimtab.models.lora import base_layer
from trimtab.models.packed import PackedModel


@dataclass
class PolicyOutput:
    """Requested values at the N trained tokens."""

    log_probs_N: Tensor | None = None
    entropy_N: Tensor | None = None
    divergence_N: Tensor | None = None  # from the teacher
    choices_NK: Tensor | None = None  # log-probs over a few tokens only
    hidden_ND: Tensor | None = None
    router_logits: tuple[Tensor, ...] | None = None  # [T, experts] per layer, for this process's tokens


register_dataclass(PolicyOutput)  # so that FSDP2 of torch 2.11 finds the tensors in it


@dataclass
class TeacherHead:
    """The weights of a teacher's LM head, which a student in another process needs besides hidden states."""

    weight_VD: Tensor
    bias_V: Tensor | None
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, policy: "Policy") -> "TeacherHead":
        """The whole head without adapters; not a copy where it is not sharded. Every process must call it."""
        head = base_layer(policy.head)
        if policy.path == "logits" or type(head) is not nn.Linear:
            name = type(policy.inner).__name__
            raise UserError(f"{name} has an LM head we cannot read; use --teacher_divergence sampled")
        with torch.no_grad():
            weight_VD, bias_V = whole(head.weight), None if head.bias is None else whole(head.bias)
        return cls(weight_VD.detach(), bias_V, policy.logit_shape.scale, policy.logit_shape.softcap)

    def __call__(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight_VD, self.bias_V)

    @property
    def shape(self) -> LogitShape:
        return LogitShape(self.scale, self.softcap)

    def to(self, device: torch.device, *, copy: bool = False) -> "TeacherHead":
        moved = [x if x is None else x.to(device, copy=copy) for x in (self.weight_VD, self.bias_V)]
        return TeacherHead(moved[0], moved[1], self.scale, self.softcap)


def check_vocabularies(student: "Policy", teacher: "Policy", tokenizer: Any, name: str | None) -> None:
    """Refuse heads of different sizes, unless the rows that one lacks are padding: no tokens of their tokenizer."""
    sizes = [model.head.out_features for model in (teacher, student)]
    if sizes[0] != sizes[1] and min(sizes) < len(tokenizer):
        raise UserError(
            f"--teacher_model {name}: its vocabulary ({sizes[0]:,} outputs) is not the student's ({sizes[1]:,}), and "
            f"their tokenizer has {len(tokenizer):,} tokens; distil between models that share a vocabulary"
        )


@dataclass
class Teacher:
    """The teacher's hidden states at all trained tokens, and its head; None: the student's own."""

    hidden_ND: Tensor
    head: Callable[[Tensor], Tensor] | None
    shape: LogitShape
    divergence: Callable[[Tensor, Tensor], Tensor]  # (student logits, teacher logits) -> divergence of each token


class Policy(PackedModel):
    """The root module of every job that trains a policy."""

    @property
    def head(self) -> nn.Module:
        return self.inner.get_output_embeddings()

    @property
    def logit_shape(self) -> LogitShape:
        return LogitShape.of(self.config)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Gather all weights for inference inside the context. Every process must enter."""
        with gathered(self):
            yield

    def forward(
        self,
        batch: TokenBatch,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        router: bool = False,
        teacher: Teacher | None = None,
        choices_K: Tensor | None = None,
        hidden_only: bool = False,
    ) -> PolicyOutput:
        """Log-probs of the trained tokens, each predicted from the position before it.

        With `choices_K`: instead the log-probs over only these tokens, at the marked positions themselves. With
        `hidden_only`: instead the hidden states that predict the trained tokens.
        """
        batch = self.rotary.separate(batch)
        if self.path == "logits":
            assert choices_K is None and not hidden_only and teacher is None
            rows, logits = self.own_logits(batch)
            predicting_N = rows.flat_T[batch.predictors_N]
            logits = shaped_logits(logits.flatten(0, 1)[predicting_N], LogitShape(), temperature)
            log_probs = logits.log_softmax(-1)
            entropies = -(log_probs.exp() * log_probs).sum(-1) if entropy else None
            return PolicyOutput(log_probs.gather(-1, batch.targets_N[:, None])[:, 0], entropies)
        read = self.read(batch, batch.predictors_N if choices_K is None else batch.trained_N, router=router)
        if choices_K is not None:
            choices = choice_log_probs(read.states_ND, self.head, choices_K, self.logit_shape)
            return PolicyOutput(choices_NK=read.whole(choices), router_logits=read.routers)
        if hidden_only:
            return PolicyOutput(hidden_ND=read.whole(read.states_ND))
        log_probs, entropies = token_log_probs(
            read.states_ND,
            self.head,
            read.own(batch.targets_N),
            shape=self.logit_shape,
            temperature=temperature,
            entropy=entropy,
        )
        out = PolicyOutput(read.whole(log_probs), router_logits=read.routers)
        if entropies is not None:
            out.entropy_N = read.whole(entropies)
        if teacher is not None:
            divergence = token_divergence(
                *(read.states_ND, self.head, self.logit_shape),
                *(read.own(teacher.hidden_ND), teacher.head or self.head, teacher.shape),
                *(teacher.divergence, temperature),
            )
            out.divergence_N = read.whole(divergence)
        return out

    def check_values(self, batch: TokenBatch) -> Tensor:
        return self(batch).log_probs_N

    def reference_values(self, batch: TokenBatch) -> Tensor:
        pieces = []
        for i in range(len(batch.spans)):
            ids = batch.sequence(i)
            logits = self.inner(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
            pieces.append(logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0])
        return torch.cat(pieces)
