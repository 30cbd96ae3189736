"""Losses of supervised jobs: likelihood, distillation, preferences, reward models, and the balance of experts.

SFT:

    L = - (1 / N) sum over trained tokens of log p(token | what comes before)
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

Preferences: DPO, IPO, SimPO, ORPO and KTO of policies; reward models and process reward models.

    h = (log pi(chosen) - log pi(rejected)) - (log ref(chosen) - log ref(rejected))       sums over answer tokens

    DPO    -log sigmoid(beta h)                                                  Rafailov et al. 2023
    cDPO   -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)                 labels flipped with probability s
    IPO    (h - 1 / (2 beta))^2                                                  Azar et al. 2023
           with h of mean log-probs too: the form that its authors confirmed to TRL as the one of their experiments
    SimPO  -log sigmoid(beta h - gamma), h of mean log-probs, no reference       Meng et al. 2024
    ORPO   NLL(chosen) - beta log sigmoid(log odds ratio), mean log-probs, no reference    Hong et al. 2024

SimPO is DPO with lengths divided out, no reference, and a margin; ORPO is DPO's sigmoid on log-odds plus the NLL of
the chosen answer, which the caller adds as a token mean.

    KTO    good answers: w_good (1 - sigmoid(beta (r - z))),   bad ones: w_bad (1 - sigmoid(beta (z - r)))
           r = log pi(y | x) - log ref(y | x)                                    Ethayarajh et al. 2024
           z = max(0, mean of r over mismatched pairs (x_i, y_{i+1}))            no gradient

KTO's answers are not in pairs. z is one number for the whole optimizer step, so cutting the step into micro-batches
does not change the loss.

    reward model     -log sigmoid(d),   d = r_chosen - r_rejected - margin       Bradley-Terry, in fp32
                     (the documents' log(1 + exp(-d)) is the same function)
    process reward   hard label k: -log p_k,   p the softmax over the reward tokens alone, at the end of every step
                     soft label q (two tokens): -(q log p_0 + (1 - q) log p_1),   p_0 is the positive token
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
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


# ---- DPO, IPO, SimPO, ORPO


def dpo_loss(h_P: Tensor, beta: float, label_smoothing: float = 0.0, margin: float = 0.0) -> Tensor:
    """Loss of each pair. `margin` is SimPO's gamma."""
    logits = beta * h_P - margin
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def ipo_loss(h_P: Tensor, beta: float) -> Tensor:
    return (h_P - 1 / (2 * beta)).square()


def log_odds_ratio(chosen_mean_P: Tensor, rejected_mean_P: Tensor) -> Tensor:
    """log of odds(chosen) / odds(rejected), odds(p) = p / (1 - p), from mean log-probs."""
    return (chosen_mean_P - rejected_mean_P) - (_log1mexp(chosen_mean_P) - _log1mexp(rejected_mean_P))


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0 without losing digits near either end."""
    x = x.clamp(max=-1e-7)
    return torch.where(x > -0.6931, torch.log(-torch.expm1(x)), torch.log1p(-x.exp()))


# ---- KTO


def kl_baseline(mean_mismatched_ratio: Tensor) -> Tensor:
    """z, from the mean of log pi - log ref over the step's mismatched pairs."""
    return mean_mismatched_ratio.clamp(min=0).detach()


def kto_loss(ratio_B: Tensor, good_B: Tensor, z: Tensor, beta: float, good_weight: float, bad_weight: float) -> Tensor:
    """Loss of each answer; `ratio_B` is its r."""
    gain = torch.where(good_B, ratio_B - z, z - ratio_B)
    weight = torch.where(good_B, good_weight, bad_weight)
    return weight * (1 - torch.sigmoid(beta * gain))


# ---- reward models


def pairwise_loss(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor | None = None) -> Tensor:
    """Loss of each pair."""
    difference = chosen_P.float() - rejected_P.float()
    if margin_P is not None:
        difference = difference - margin_P
    return -F.logsigmoid(difference)


# ---- process reward models


def hard_step_loss(log_probs_NK: Tensor, labels_N: Tensor) -> Tensor:
    """Loss of each step; `labels_N` are class indices."""
    return -log_probs_NK.gather(1, labels_N.long()[:, None])[:, 0]


def soft_step_loss(log_probs_N2: Tensor, positive_N: Tensor) -> Tensor:
    """Loss of each step; `positive_N` is the probability of the positive label."""
    target_N2 = torch.stack([positive_N, 1 - positive_N], -1)
    return -(target_N2 * log_probs_N2).sum(-1)
