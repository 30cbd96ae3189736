"""The losses of the actor and the critic: a micro-batch's share of one optimizer step.

    policy    over all answer tokens of the step, the mean of
                  coefficient x surrogate (--policy_loss_type)  + beta KL(policy, reference)  [--use_kl_loss]
                  - coefficient x entropy  + coefficient x divergence(policy, teacher)  [--teacher_divergence]
    critic    over the same tokens, the mean of the clipped squared distance from the returns

The means are over the whole step, so micro-batch size, packing and process count do not change the loss. `totals` has
the `tokens` and `answers` of all samples, including those left out because they have no gradient, and the `seen_tokens`
of the samples in the micro-batches. To change the objective, change it here.
"""

import torch
from torch import Tensor

from trimtab.algos.advantages import discounted_sums
from trimtab.algos.policy_losses import (
    is_corrected,
    kl_estimate,
    mismatch_weights,
    policy_objective,
    surrogate_loss,
    value_loss,
)
from trimtab.algos.supervised_losses import divergence
from trimtab.config.rl_jobs import RLOptions
from trimtab.data.batches import TokenBatch
from trimtab.models.policy import Policy, Teacher, TeacherHead
from trimtab.models.reward import Critic
from trimtab.train.rl.micro_batches import AnswerBatch, TextBatch
from trimtab.train.update import LossTerm, Totals, balance_loss_term, counts_by_sequence


def policy_loss_term(
    policy: Policy,
    batch: AnswerBatch,
    totals: Totals,
    options: RLOptions,
    *,
    kl_coefficient: float,
    entropy_coefficient: float | None = None,
    teacher_head: TeacherHead | None = None,
) -> LossTerm:
    """The policy loss of a micro-batch.

    `batch.extra`: advantages_N and sampled_N; old_N if the policy was updated since sampling; reference_N for a KL
    loss, together with remaining_N if the KL was not computed before the update; fresh_N if older weights sampled some
    tokens; counts_N if an answer may have several sequences; chosen_N where the loss chooses tokens by their
    covariance; teacher_ND for a divergence over the whole vocabulary, whose head is `teacher_head` (None: the policy's
    own).
    """
    extra, teacher = batch.extra, None
    if "teacher_ND" in extra:
        shape = policy.logit_shape if teacher_head is None else teacher_head.shape
        distance = divergence(options.teacher_divergence, options.jsd_beta)
        teacher = Teacher(extra["teacher_ND"], teacher_head, shape, distance)
    out = policy(
        batch,
        temperature=options.temperature,
        entropy=options.measures_entropy,
        router=options.aux_loss_coef > 0,
        teacher=teacher,
    )
    log_probs_N = out.log_probs_N
    old_N = extra.get("old_N", log_probs_N.detach())
    weights_N = token_weights(batch, totals, options)
    figures = agreement(log_probs_N, old_N, extra["sampled_N"], totals["seen_tokens"])
    if "remaining_N" in extra:
        figures |= measured_kl(old_N, batch, totals, options, kl_coefficient)
    loss_N, clipped_N = surrogate(log_probs_N, old_N, batch, options)
    figures["clip_fraction"] = clipped_N.sum() / totals["seen_tokens"]
    if "fresh_N" in extra:
        gap_N = (log_probs_N - extra["sampled_N"]).abs()
        figures["log_prob_gap_fresh"] = (gap_N * extra["fresh_N"]).sum() / max(totals["fresh_tokens"], 1.0)
    if options.mismatch_correction is not None:
        sequences = batch.owners_N, len(batch.spans)
        kind, bounds = options.mismatch_correction, options.mismatch_range
        correction_N = mismatch_weights(kind, old_N, extra["sampled_N"], *sequences, *bounds)
        loss_N = loss_N * correction_N
        figures["correction"] = correction_N.sum() / totals["seen_tokens"]
        figures["corrected_share"] = is_corrected(correction_N).sum() / totals["seen_tokens"]
    kl_N = None
    if options.use_kl_loss and "reference_N" in extra:
        kl_N = kl_estimate(log_probs_N, extra["reference_N"], options.kl_estimator)
        if options.kl_clip is not None:
            kl_N = kl_N.clamp(-options.kl_clip, options.kl_clip)
    loss, terms = policy_objective(
        loss_N,
        weights_N,
        coefficient=options.policy_loss_coef,
        kl_N=kl_N,
        kl_coefficient=kl_coefficient,
        entropy_N=out.entropy_N if options.measures_entropy else None,
        entropy_coefficient=options.entropy_loss_coef or 0.0 if entropy_coefficient is None else entropy_coefficient,
    )
    figures |= terms
    if out.divergence_N is not None:
        figures["distance"] = out.divergence_N.sum() / totals["tokens"]
        loss = loss + options.teacher_coef * (weights_N * out.divergence_N).sum()
    if options.entropy_target is not None:
        figures["token_entropy"] = out.entropy_N.sum() / totals["tokens"]  # whatever the reduction
    if options.aux_loss_coef > 0:
        figures["aux_loss"] = balance_loss_term(policy, out.router_logits, batch, totals["row_tokens"])
        loss = loss + options.aux_loss_coef * figures["aux_loss"]
    figures["loss"] = loss
    return LossTerm(loss, {name: value.detach() for name, value in figures.items()})


@torch.no_grad()
def measured_kl(
    old_N: Tensor, batch: TokenBatch, totals: Totals, options: RLOptions, kl_coefficient: float
) -> dict[str, Tensor]:
    """The KL to the reference, computed in the only update of an iteration. If the KL is part of the rewards, its
    future sum is subtracted from the advantages here."""
    extra = batch.extra
    kl_N = kl_estimate(old_N, extra["reference_N"], options.kl_estimator)
    figures = {"kl": kl_N.sum() / totals["tokens"], "kl_answer": kl_N.sum() / totals["answers"]}
    if not options.use_kl_loss:
        longest = min(max(span.length for span in batch.spans), len(kl_N)) - 1
        to_come_N = discounted_sums(kl_N, extra["remaining_N"], 1.0, longest)
        extra["advantages_N"] = extra["advantages_N"] - kl_coefficient * to_come_N
        figures["advantage_size"] = extra["advantages_N"].abs().sum() / totals["tokens"]
    return figures


def surrogate(log_probs_N: Tensor, old_N: Tensor, batch: TokenBatch, options: RLOptions) -> tuple[Tensor, Tensor]:
    """--policy_loss_type: the loss of each token, and which tokens are clipped."""
    advantages_N = batch.extra["advantages_N"]
    low, high = options.eps_clip_low_high or (options.eps_clip, options.eps_clip)
    sequences = batch.owners_N, len(batch.spans)
    return surrogate_loss(
        *(options.policy_loss_type, log_probs_N, old_N, advantages_N, *sequences),
        low=low,
        high=high,
        dual_clip=options.dual_clip,
        temperatures=options.sapo_temperatures,
        chosen_N=batch.extra.get("chosen_N"),
        kl_cov_coefficient=options.kl_cov_coef,
    )


def token_weights(batch: TokenBatch, totals: Totals, options: RLOptions) -> Tensor:
    """--loss_reduction: the weight of each token's loss in the step's loss. All weights sum to at most 1."""
    reduction = options.loss_reduction or ("answer" if options.surrogate.per_answer else "token")
    ones_N = torch.ones(len(batch.owners_N), device=batch.ids_T.device)
    if reduction == "token":
        return ones_N / totals["tokens"]
    if reduction == "answer":
        # An episode's branches are separate sequences; its tokens are weighted by the count over all branches.
        counts_N = batch.extra.get("counts_N")
        if counts_N is None:
            counts_N = counts_by_sequence(batch)[batch.owners_N]
        return ones_N / (counts_N * totals["answers"])
    assert reduction == "constant", reduction
    return ones_N / (options.most_drawn * totals["answers"])


@torch.no_grad()
def agreement(log_probs_N: Tensor, old_N: Tensor, sampled_N: Tensor, tokens: float) -> dict[str, Tensor]:
    """Mean log-prob of the sampled tokens, KL to the policy before the updates, and gap to the engine's log-probs."""
    gap_N = log_probs_N - sampled_N
    return {
        "log_prob": log_probs_N.sum() / tokens,
        "policy_kl": kl_estimate(old_N, log_probs_N, "k3").sum() / tokens,
        "log_prob_gap": gap_N.abs().sum() / tokens,
        "log_prob_ratio": gap_N.exp().sum() / tokens,
    }


def text_loss_term(policy: Policy, batch: TextBatch, totals: Totals, options: RLOptions) -> LossTerm:
    """--pretrain_data: the mean NLL of pre-training text (PTX), times --ptx_coef."""
    nll = -policy(batch).log_probs_N.sum() / totals["text_tokens"]
    loss = options.ptx_coef * nll
    return LossTerm(loss, {"ptx_loss": nll.detach(), "loss": loss.detach()})


def value_loss_term(critic: Critic, batch: AnswerBatch, totals: Totals, options: RLOptions) -> LossTerm:
    """The value loss of a micro-batch; `batch.extra`: values_N before the update, and returns_N."""
    values_N = critic(batch)
    extra = batch.extra
    loss_N, clipped_N = value_loss(values_N, extra["values_N"], extra["returns_N"], options.value_clip)
    loss = (loss_N * token_weights(batch, totals, options)).sum()
    figures = {"loss": loss.detach(), "clip_fraction": clipped_N.sum() / totals["tokens"]}
    return LossTerm(loss, figures)
