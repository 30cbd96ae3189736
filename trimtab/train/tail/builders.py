"""The roles of a tail run: those of an RL run, and a proposal, the start, and what counts bad words.

Whatever works on the policy's weights is built with it: RePULSe's proposal if it is adapters, a head or a model that
modulates the policy, and the exact probability of bad words.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from trimtab.config.jobs import TailOptions
from trimtab.distributed.launcher import Place
from trimtab.models.load import load_policy
from trimtab.models.policy import Policy
from trimtab.models.proposal_policies import SharedBasePolicy, TwistedPolicy, TwistModel, twist_of
from trimtab.rewards.build import Parts, non_model_rewards
from trimtab.rollout.sampling import stop_tokens
from trimtab.train.launch import load_job_tokenizer
from trimtab.train.rl.roles import actor_of, has_reference, optimiser_of, rollouts_of, scorer
from trimtab.train.rl.trainer import PolicyTrainer
from trimtab.train.tail.measures import BadWords, bad_tokens
from trimtab.train.tail.proposal import (
    BorrowingProposal,
    Modulation,
    ModulationModel,
    ProposalModel,
    TailActor,
)

HEAD_LAYERS = {"modulation_linear_head": 1, "modulation_nn_head": 3}


def build_actor(options: TailOptions, place: Place) -> dict[str, Any]:
    tokenizer = load_job_tokenizer(options)
    loaded = load_policy(options, place.device, place.mesh)
    borrowing = None
    if options.method == "repulse" and options.proposal_lora_rank > 0:
        borrowing = _borrowing_policy(loaded.model, options, place)
    kind = PolicyTrainer if options.method == "ppo" else TailActor
    rewards = non_model_rewards(options, place.stop.requested)
    roles: dict[str, Any] = {
        "actor": actor_of(options, loaded, tokenizer, place, kind),
        "rollouts": rollouts_of(options, loaded.model, rewards, tokenizer, place),
    }
    if options.lora_rank > 0 and (name := name_of_start(options)):
        roles[name] = scorer(options, place, loaded)
    if options.method == "repulse":
        learner, rollouts = _proposal(loaded.model, borrowing, rewards, options, tokenizer, place)
        roles |= {"proposal": learner, "proposal_rollouts": rollouts}
    if options.analytic_bad_word_calc:
        bad, stops = bad_tokens(options, tokenizer), stop_tokens(loaded.model, tokenizer)
        roles["bad_words"] = BadWords(loaded.model, bad, options.generate_max_len, stops)
    return roles


def build_start(options: TailOptions, place: Place) -> dict[str, Any]:
    return {"start": scorer(options, place)}


def name_of_start(options: TailOptions) -> str | None:
    """The role of the policy as it was: what a KL is measured to, or what held-out answers alone are compared with."""
    if has_reference(options):
        return "reference"
    return "start" if options.evaluate_heldout_sampling else None


def _proposal(
    policy: Policy,
    borrowing: SharedBasePolicy | None,
    rewards: Parts,
    options: TailOptions,
    tokenizer: Any,
    place: Place,
) -> tuple[ProposalModel, Any]:
    """Its learner, and what answers prompts with it."""

    def learner(make: Callable[..., ProposalModel], model: Any) -> ProposalModel:
        its_options = dataclasses.replace(options, enable_ema=False)
        trained = model if isinstance(model, TwistModel) else model.model
        optimiser = optimiser_of(its_options, trained, options.proposal_learning_rate, place)
        return make(its_options, model, optimiser, tokenizer, place.device, place.mesh)

    answering = partial(rollouts_of, options, rewards=rewards, tokenizer=tokenizer, place=place)
    if borrowing is not None:
        return learner(BorrowingProposal, borrowing), answering(borrowing)
    if options.proposal in HEAD_LAYERS:
        model = TwistedPolicy(policy, twist_of(policy, layers=HEAD_LAYERS[options.proposal]))
        return learner(Modulation, model), answering(model)
    if options.proposal == "modulation_model":
        psi = _second_model(options, place, TwistModel)
        model = TwistedPolicy(policy, psi.twist, psi)
        return learner(partial(ModulationModel, model), psi), answering(model)
    second = _second_model(options, place)
    return learner(ProposalModel, second), answering(second)


def _second_model(options: TailOptions, place: Place, within: Callable[[Policy], Any] = lambda policy: policy) -> Any:
    """From the same weights as the policy, and trained in full."""
    whole = dataclasses.replace(options, lora_rank=0)
    return load_policy(whole, place.device, place.mesh, within=within).model


def _borrowing_policy(policy: Policy, options: TailOptions, place: Place) -> SharedBasePolicy:
    adapted = dataclasses.replace(options, lora_rank=options.proposal_lora_rank)
    return SharedBasePolicy(policy, adapted, place.device, split=place.mesh.size > 1)
