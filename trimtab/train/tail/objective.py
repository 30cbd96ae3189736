"""What the policy and the proposal of a tail method minimise: a micro-batch's share of one optimiser step.

    (1 / answers) sum over tokens of -A_it log p(s_it)        policy: REINFORCE, with the push-down term in A
    (1 / answers) sum over tokens of -A_it log psi_it         proposal: contrastive twist learning

`totals["answers"]` are the policy's own answers, also where the proposal's are pushed down in the same step.
"""

import torch
from torch import Tensor

from trimtab.algos.policy_losses import reinforce_loss
from trimtab.data.batches import TokenBatch
from trimtab.models.policy import Policy
from trimtab.train.rl.objective import agreement
from trimtab.train.task import Share, Totals


def policy_share(policy: Policy, batch: TokenBatch, totals: Totals) -> Share:
    """`batch.extra`: advantages_N, and sampled_N where the answers are the policy's own."""
    log_probs_N = policy(batch).log_probs_N
    loss = reinforce_loss(log_probs_N, batch.extra["advantages_N"]).sum() / totals["answers"]
    return Share(loss, {"loss": loss.detach(), **_agreement(log_probs_N, batch, totals)})


def twist_share(log_twist_N: Tensor, batch: TokenBatch, totals: Totals) -> Share:
    """`batch.extra`: advantages_N."""
    loss = reinforce_loss(log_twist_N, batch.extra["advantages_N"]).sum() / totals["answers"]
    return Share(loss, {"loss": loss.detach()})


def _agreement(log_probs_N: Tensor, batch: TokenBatch, totals: Totals) -> dict[str, Tensor]:
    """How far what is trained is from what was sampled; a proposal's answers say nothing of that."""
    sampled_N = batch.extra.get("sampled_N")
    if sampled_N is None:
        nothing = torch.zeros((), device=log_probs_N.device)
        return {"log_prob_gap": nothing, "log_prob_ratio": nothing}
    found = agreement(log_probs_N, log_probs_N, sampled_N, totals["seen_tokens"])
    return {name: found[name] for name in ("log_prob_gap", "log_prob_ratio")}
