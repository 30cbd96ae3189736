"""Losses on given tokens: SFT's likelihood, distillation's divergences, and the balance of experts.

    SFT          L = - (1 / N) sum over trained tokens of log p(token | what comes before)
                 N counts the trained tokens of the whole optimizer step, over all its micro-batches and ranks: the
                 sum is returned here, and the caller divides once

Distillation: distances between the teacher's (p) and the student's (q) distributions over the next token.

    forward KL   -sum p log q          (the cross-entropy: its gradient is KL(p || q)'s)
    reverse KL    sum q (log q - log p)
    JSD(b)        b KL(p || m) + (1 - b) KL(q || m),   m = b p + (1 - b) q                   Agarwal et al. 2024

With b near 0, JSD / b tends to KL(p || q); with b near 1, JSD / (1 - b) tends to KL(q || p).

Mixture of experts: the load-balancing loss of the routers (Switch Transformer, equations 4 to 6, over all layers).

    L = E * sum_e f_e P_e

f_e: share of (token, layer) pairs that send one of their k choices to expert e; P_e: mean router probability of e.
f is a count and has no gradient. The loss of a step is the token-weighted mean over its micro-batches, so unlike the
main loss it depends on how the step is cut.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


def sft_loss_sum(log_probs_N: Tensor) -> Tensor:
    return -log_probs_N.sum()


# ---- distillation


Divergence = Callable[[Tensor, Tensor], Tensor]


def forward_kl(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    return -(teacher_NV.softmax(-1) * student_NV.log_softmax(-1)).sum(-1)


def reverse_kl(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    student = student_NV.log_softmax(-1)
    return (student.exp() * (student - teacher_NV.log_softmax(-1))).sum(-1)


def jensen_shannon(student_NV: Tensor, teacher_NV: Tensor, beta: float) -> Tensor:
    student, teacher = student_NV.log_softmax(-1), teacher_NV.log_softmax(-1)
    if beta in (0.0, 1.0):  # the mixture is one of the two
        first, second = (teacher, student) if beta == 0 else (student, teacher)
        return (first.exp() * (first - second)).sum(-1)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    from_teacher = (teacher.exp() * (teacher - mixture)).sum(-1)
    from_student = (student.exp() * (student - mixture)).sum(-1)
    return beta * from_teacher + (1 - beta) * from_student


def divergence(name: str, jsd_beta: float = 0.5) -> Divergence:
    jsd = partial(jensen_shannon, beta=jsd_beta)
    kinds: dict[str, Divergence] = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd}
    return kinds[name]


# ---- mixture of experts


def load_balancing_loss(
    router_logits: tuple[Tensor, ...], top_k: int, add_up: Callable[[Tensor], Tensor] = lambda sums: sums
) -> Tensor:
    """`router_logits`: one [tokens, experts] tensor a layer, real tokens only. `add_up`: sums over all tokens of the
    micro-batch from sums over these, where these are not all."""
    probabilities = torch.stack([layer.float().softmax(-1) for layer in router_logits])  # [layers, tokens, experts]
    experts = probabilities.shape[-1]
    chosen = torch.bincount(probabilities.topk(top_k, dim=-1).indices.flatten(), minlength=experts)
    pairs = chosen.new_full((1,), probabilities.shape[0] * probabilities.shape[1])
    sums = add_up(torch.cat([chosen.float(), pairs.float(), probabilities.sum((0, 1))]))
    chosen, pairs, mass = sums.split([experts, 1, experts])
    return experts * ((chosen.detach() / pairs.detach()) * (mass / pairs.detach())).sum()
