"""The roles of a tail run: those of an RL run, RePULSe's proposal, the initial policy, and exact bad-word counts.

A micro-batch's share of one optimizer step:

    (1 / answers) sum over tokens of -A_it log p(s_it)        policy: REINFORCE, with the push-down term in A
    (1 / answers) sum over tokens of -A_it log psi_it         proposal: contrastive twist learning

`totals["answers"]` counts the policy's answers only, also if the proposal's are pushed down in the same step.

The proposal is a second language model q, LoRA adapters on the policy's weights, or a modulation of the policy: a head
or a second model. Adapters and heads use the policy's weights: they are built with the policy, every process holds all
of their parameters, and their gradients are averaged.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from trimtab.algos.policy_losses import reinforce_loss
from trimtab.config.rl_jobs import TailOptions
from trimtab.data.batches import TokenBatch
from trimtab.distributed.fsdp import whole
from trimtab.distributed.launcher import RoleContext, Unit
from trimtab.models.load import load_policy
from trimtab.models.packed import scoring
from trimtab.models.policy import Policy
from trimtab.models.proposal_policies import SharedBasePolicy, TwistedPolicy, TwistModel, twist_of
from trimtab.rewards.build import Parts, non_model_rewards
from trimtab.rollout.sampling import stop_tokens
from trimtab.train.launch import load_job_tokenizer
from trimtab.train.rl.micro_batches import Slice, batches_of
from trimtab.train.rl.objective import agreement
from trimtab.train.rl.roles import (
    actor_of,
    assign_processes,
    has_reference,
    make_optimizer,
    make_units,
    rollouts_of,
    scorer,
)
from trimtab.train.rl.trainer import PolicyTrainer, fetched
from trimtab.train.tail.measurements import BadWords, bad_tokens
from trimtab.train.update import LossTerm, Totals, memory_guard

# ---- trainers


TWIST = "twist.safetensors"


class TailPolicyTrainer(PolicyTrainer):
    """Trains the policy by REINFORCE with the push-down term."""

    def share(self, batch: TokenBatch, totals: Totals, **settings: Any) -> LossTerm:
        """`batch.extra`: advantages_N, and sampled_N for the policy's own answers. The gap between sampled and trained
        log-probs cannot be measured on the proposal's answers."""
        log_probs_N, sampled_N = self.model(batch).log_probs_N, batch.extra.get("sampled_N")
        loss = reinforce_loss(log_probs_N, batch.extra["advantages_N"]).sum() / totals["answers"]
        found = dict.fromkeys(("log_prob_gap", "log_prob_ratio"), torch.zeros((), device=log_probs_N.device))
        if sampled_N is not None:
            figures = agreement(log_probs_N, log_probs_N, sampled_N, totals["seen_tokens"])
            found = {name: figures[name] for name in found}
        return LossTerm(loss, {"loss": loss.detach(), **found})


class ProposalTrainer(PolicyTrainer):
    """Trains a second language model q: log psi = log q - log p, with p before the updates."""

    def log_twist(self, batch: TokenBatch) -> Tensor:
        """log psi of every token."""
        return self.model(batch).log_probs_N - batch.extra["policy_N"]

    def share(self, batch: TokenBatch, totals: Totals, **settings: Any) -> LossTerm:
        loss = reinforce_loss(self.log_twist(batch), batch.extra["advantages_N"]).sum() / totals["answers"]
        return LossTerm(loss, {"loss": loss.detach()})

    def log_twists(self, slices: Sequence[Slice]) -> list[Tensor]:
        with memory_guard(), scoring(self.model):
            return fetched([self.log_twist(batch.to(self.device.torch)) for batch in batches_of(slices)])


class AdapterProposalTrainer(ProposalTrainer):
    """Trains LoRA adapters on the policy's weights."""

    def update(self, slices: Sequence[Slice], **settings: Any) -> dict[str, float]:
        with self.model.at_work():
            return super().update(slices, **settings)

    def try_update(self, **asked: Any) -> dict[str, Any]:
        with self.model.at_work():
            return super().try_update(**asked)

    def fake_model(self) -> None:
        return None  # adapters alone are trained

    def gather_gradients(self) -> None:
        gradients = self.optimizer.accumulated
        for name, parameter in self.optimizer.working.items():
            if name in gradients:
                gradients[name] = self.mesh.gradients.sum(gradients[name]) / self.mesh.gradients.size
            else:
                parameter.grad = self.mesh.gradients.sum(parameter.grad) / self.mesh.gradients.size

    def log_probs(self, slices: Sequence[Slice]) -> list[Tensor]:
        with self.model.at_work():
            return super().log_probs(slices)

    def write_model(self, folder: Path) -> None:
        """Save the adapters. Their base is the policy in the parent folder or, if the policy is an adapter too, the
        pretrained model."""
        if self.mesh.is_rank_zero:
            if self.options.lora_rank == 0:
                self.model.model.active_peft_config.base_model_name_or_path = str(folder.parent)
            self.model.model.save_pretrained(folder)


class TwistHeadTrainer(AdapterProposalTrainer):
    """Trains a head on the policy's hidden states, whose output is log psi."""

    def log_twist(self, batch: TokenBatch) -> Tensor:
        return self.model.log_twists(batch)

    def log_twists(self, slices: Sequence[Slice]) -> list[Tensor]:
        with self.model.at_work():
            return super().log_twists(slices)

    def write_model(self, folder: Path) -> None:
        if self.mesh.is_rank_zero:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(self.model.twist.state_dict(), folder / TWIST)


class TwistModelTrainer(ProposalTrainer):
    """Trains a second model, whose output is log psi."""

    model: TwistModel

    def __init__(self, twisted: TwistedPolicy, *parts: Any):
        super().__init__(*parts)
        self.twisted = twisted

    def log_twist(self, batch: TokenBatch) -> Tensor:
        return self.model(batch)

    def log_probs(self, slices: Sequence[Slice]) -> list[Tensor]:
        with memory_guard(), self.twisted.at_work(), scoring(self.twisted):
            return fetched([self.twisted(batch.to(self.device.torch)).log_probs_N for batch in batches_of(slices)])

    def write_model(self, folder: Path) -> None:
        weights = {name: whole(value) for name, value in self.model.twist.state_dict().items()}
        super().write_model(folder)
        if self.mesh.is_rank_zero:
            save_file(weights, folder / TWIST)


# ---- builders


HEAD_LAYERS = {"modulation_linear_head": 1, "modulation_nn_head": 3}


def build_actor(options: TailOptions, place: RoleContext) -> dict[str, Any]:
    tokenizer = load_job_tokenizer(options)
    loaded = load_policy(options, place.device, place.mesh)
    shared_base = None
    if options.method == "repulse" and options.proposal_lora_rank > 0:
        adapted = dataclasses.replace(options, lora_rank=options.proposal_lora_rank)
        shared_base = SharedBasePolicy(loaded.model, adapted, place.device, split=place.mesh.size > 1)
    kind = PolicyTrainer if options.method == "ppo" else TailPolicyTrainer
    rewards = non_model_rewards(options, place.stop.requested)
    roles: dict[str, Any] = {
        "actor": actor_of(options, loaded, tokenizer, place, kind),
        "rollouts": rollouts_of(options, loaded.model, rewards, tokenizer, place),
    }
    if options.lora_rank > 0 and (name := name_of_start(options)):
        roles[name] = scorer(options, place, loaded)
    if options.method == "repulse":
        learner, rollouts = _proposal(loaded.model, shared_base, rewards, options, tokenizer, place)
        roles |= {"proposal": learner, "proposal_rollouts": rollouts}
    if options.analytic_bad_word_calc:
        bad, stops = bad_tokens(options, tokenizer), stop_tokens(loaded.model, tokenizer)
        roles["bad_words"] = BadWords(loaded.model, bad, options.generate_max_len, stops)
    return roles


def build_start(options: TailOptions, place: RoleContext) -> dict[str, Any]:
    return {"start": scorer(options, place)}


def name_of_start(options: TailOptions) -> str | None:
    """The role with the initial policy: "reference" if it is needed for a KL, "start" if only for held-out answers."""
    if has_reference(options):
        return "reference"
    return "start" if options.evaluate_heldout_sampling else None


def _proposal(
    policy: Policy,
    shared_base: SharedBasePolicy | None,
    rewards: Parts,
    options: TailOptions,
    tokenizer: Any,
    place: RoleContext,
) -> tuple[ProposalTrainer, Any]:
    """The proposal's trainer and its rollout worker."""

    def learner(make: Callable[..., ProposalTrainer], model: Any) -> ProposalTrainer:
        its_options = dataclasses.replace(options, enable_ema=False)
        trained = model if isinstance(model, TwistModel) else model.model
        optimizer = make_optimizer(its_options, trained, options.proposal_learning_rate, place)
        return make(its_options, model, optimizer, tokenizer, place.device, place.mesh)

    make_rollouts = partial(rollouts_of, options, rewards=rewards, tokenizer=tokenizer, place=place)
    if shared_base is not None:
        return learner(AdapterProposalTrainer, shared_base), make_rollouts(shared_base)
    if options.proposal in HEAD_LAYERS:
        model = TwistedPolicy(policy, twist_of(policy, layers=HEAD_LAYERS[options.proposal]))
        return learner(TwistHeadTrainer, model), make_rollouts(model)
    if options.proposal == "modulation_model":
        psi = _second_model(options, place, TwistModel)
        model = TwistedPolicy(policy, psi.twist, psi)
        return learner(partial(TwistModelTrainer, model), psi), make_rollouts(model)
    second = _second_model(options, place)
    return learner(ProposalTrainer, second), make_rollouts(second)


def _second_model(
    options: TailOptions, place: RoleContext, within: Callable[[Policy], Any] = lambda policy: policy
) -> Any:
    """A model with the policy's initial weights, trained in full."""
    whole = dataclasses.replace(options, lora_rank=0)
    return load_policy(whole, place.device, place.mesh, within=within).model


# ---- units


def tail_units_of(options: TailOptions, processes: int) -> list[Unit]:
    """The units of an RL run with the proposal's roles in the policy's unit, and the initial policy if only held-out
    answers need it."""
    actor, *others = make_units(options)
    start = name_of_start(options)
    roles = ["actor", "rollouts"]
    if start and options.lora_rank > 0:
        roles.append(start)
    if options.method == "repulse":
        roles += ["proposal", "proposal_rollouts"]
    if options.analytic_bad_word_calc:
        roles.append("bad_words")
    units = [dataclasses.replace(actor, build=build_actor, roles=tuple(roles)), *others]
    if start == "start" and options.lora_rank == 0:
        units.append(Unit("start", build_start, ("start",)))
    return assign_processes(options, units, processes)
