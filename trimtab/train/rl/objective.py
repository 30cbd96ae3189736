"""What the actor and the critic minimise: a micro-batch's share of one optimiser step.

    policy    mean over all answer tokens of the step of
                  clipped surrogate + beta KL(policy, reference)  [--use_kl_loss]  - coefficient x entropy
    critic    mean over the same tokens of the clipped squared distance from the returns

The means are over the whole step: how it is cut, packed or dealt out changes nothing. `totals` has the `tokens` of all
samples, also of those left out because they have no gradient, and the `seen_tokens` of those that are here.
To change what is learnt, change it here.
"""

from typing import Any

import torch

from trimtab.algos import kl, policy_loss, value_loss
from trimtab.algos.moe_balance import load_balancing_loss
from trimtab.data.batches import TokenBatch
from trimtab.models.critic import Critic
from trimtab.models.policy import Policy
from trimtab.train.task import Share, Totals


def policy_share(policy: Policy, batch: TokenBatch, totals: Totals, options: Any, *, kl_coefficient: float) -> Share:
    """`batch.extra`: advantages_N and sampled_N; old_N if the policy has moved since; reference_N for a KL loss."""
    tokens, extra = totals["tokens"], batch.extra
    out = policy(
        batch,
        temperature=options.temperature,
        entropy=options.entropy_loss_coef is not None,
        router=options.aux_loss_coef > 0,
    )
    log_probs_N = out.log_probs_N
    old_N = extra.get("old_N", log_probs_N.detach())
    low, high = options.eps_clip_low_high or (options.eps_clip, options.eps_clip)
    loss_N, clipped_N = policy_loss.clipped(log_probs_N, old_N, extra["advantages_N"], low, high, options.dual_clip)
    loss = loss_N.sum() / tokens
    seen = totals["seen_tokens"]
    with torch.no_grad():
        gap_N = log_probs_N - extra["sampled_N"]
        figures = {
            "policy_loss": loss,
            "clip_fraction": clipped_N.sum() / seen,
            "policy_kl": kl.estimate(old_N, log_probs_N, "k3").sum() / seen,
            "log_prob_gap": gap_N.abs().sum() / seen,
            "log_prob_ratio": gap_N.exp().sum() / seen,
        }
    if options.use_kl_loss and "reference_N" in extra:
        kl_loss = kl.estimate(log_probs_N, extra["reference_N"], options.kl_estimator).sum() / tokens
        loss = loss + kl_coefficient * kl_loss
        figures["kl_loss"] = kl_loss
    if options.entropy_loss_coef is not None:
        entropy = out.entropy_N.sum() / tokens
        loss = loss - options.entropy_loss_coef * entropy
        figures["entropy"] = entropy
    if options.aux_loss_coef > 0:
        balance = load_balancing_loss(out.router_logits, policy.config.num_experts_per_tok)
        balance = balance * (batch.tokens / totals["row_tokens"])
        loss = loss + options.aux_loss_coef * balance
        figures["aux_loss"] = balance
    figures["loss"] = loss
    return Share(loss, {name: value.detach() for name, value in figures.items()})


def value_share(critic: Critic, batch: TokenBatch, totals: Totals, options: Any) -> Share:
    """`batch.extra`: values_N as they were, and returns_N."""
    values_N = critic(batch)
    extra = batch.extra
    loss_N, clipped_N = value_loss.clipped(values_N, extra["values_N"], extra["returns_N"], options.value_clip)
    loss = loss_N.sum() / totals["tokens"]
    figures = {"loss": loss.detach(), "clip_fraction": clipped_N.sum() / totals["tokens"]}
    return Share(loss, figures)
