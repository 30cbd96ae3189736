"""From checked options to a tail run: what an RL run has, and a proposal, the start, held-out prompts, measures."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from trimtab.config.jobs import TailOptions
from trimtab.config.repulse_spelling import run_name
from trimtab.data.prompts import Stores
from trimtab.errors import UserError
from trimtab.evaluate.bad_words import check_countable
from trimtab.interrupts import StopRequest
from trimtab.models.borrowed import BorrowingPolicy
from trimtab.models.load import load_policy, policy_skeleton
from trimtab.models.modulated import ModulatedPolicy, TwistModel, twist_of
from trimtab.models.policy import Policy
from trimtab.rollout.stopping import stop_tokens
from trimtab.rollout.types import Sampling
from trimtab.train.launch import load_job_tokenizer
from trimtab.train.rl.launch import Builder, rehearse_rl, train_rl
from trimtab.train.rl.learner import Actor
from trimtab.train.tail.files import TailFiles
from trimtab.train.tail.loop import TailRoles, TailRun
from trimtab.train.tail.measures import BadWords, Measures, bad_tokens
from trimtab.train.tail.prompts import HELD_OUT, load_tail_stores
from trimtab.train.tail.proposal import (
    BorrowingProposal,
    Modulation,
    ModulationModel,
    ProposalModel,
    TailActor,
)

HEAD_LAYERS = {"modulation_linear_head": 1, "modulation_nn_head": 3}


def train_tail(options: TailOptions) -> None:
    train_rl(options, TailBuilder)


def rehearse_tail(options: TailOptions) -> list[str]:
    lines = rehearse_rl(options, load_tail_stores, options.num_episodes * options.fit_steps)
    if options.analytic_bad_word_calc:
        try:
            bad = bad_tokens(options, load_job_tokenizer(options))
        except UserError as error:
            return [*lines, f"warning: {error}"]
        check_countable(vocabulary_of(policy_skeleton(options)), bad, options.generate_max_len)
    return lines


def vocabulary_of(policy: Policy) -> int:
    return policy.config.get_text_config().vocab_size


class TailBuilder(Builder):
    options: TailOptions

    def _actor_class(self) -> type[Actor]:
        return Actor if self.options.method == "ppo" else TailActor

    def _episodes(self) -> int:
        return self.options.num_episodes * self.options.fit_steps

    def _load_stores(self) -> Stores:
        return load_tail_stores(self.options, self.tokenizer)

    def _roles(self, stop: StopRequest) -> dict[str, Any]:
        options = self.options
        bad = bad_tokens(options, self.tokenizer) if options.analytic_bad_word_calc else None
        if bad is not None:
            check_countable(vocabulary_of(self.loaded.model), bad, options.generate_max_len)
        borrowing = options.method == "repulse" and options.proposal_lora_rank > 0
        self.borrowing = self._borrowing_policy() if borrowing else None
        roles = super()._roles(stop)
        if HELD_OUT in self.stores:
            roles["start"] = roles.get("reference") or self._scorer(None)
        if options.method == "repulse":
            roles |= self._proposal(stop)
        if bad is not None:
            policy = self.loaded.model
            prompt, stops = self.stores["train"].ids(0), stop_tokens(policy, self.tokenizer)
            roles["bad_words"] = BadWords(policy, prompt, bad, options.generate_max_len, stops)
        return roles

    def _proposal(self, stop: StopRequest) -> dict[str, Any]:
        """Its learner, and what answers prompts with it."""
        options, policy = self.options, self.loaded.model
        if self.borrowing is not None:
            learner = self._learner(BorrowingProposal, self.borrowing)
            rollouts = self._rollouts(self.borrowing, stop)
        elif options.proposal in HEAD_LAYERS:
            model = ModulatedPolicy(policy, twist_of(policy, layers=HEAD_LAYERS[options.proposal]))
            learner, rollouts = self._learner(Modulation, model), self._rollouts(model, stop)
        elif options.proposal == "modulation_model":
            psi = self._second_model(TwistModel)
            model = ModulatedPolicy(policy, psi.twist, psi)
            learner, rollouts = self._learner(partial(ModulationModel, model), psi), self._rollouts(model, stop)
        else:
            model = self._second_model()
            learner, rollouts = self._learner(ProposalModel, model), self._rollouts(model, stop)
        return {"proposal": learner, "proposal_rollouts": rollouts}

    def _second_model(self, within: Callable[[Policy], Any] = lambda policy: policy) -> Any:
        """From the same weights as the policy, and trained in full."""
        options = dataclasses.replace(self.options, lora_rank=0)
        return load_policy(options, self.device, self.mesh, within=within).model

    def _borrowing_policy(self) -> BorrowingPolicy:
        options = dataclasses.replace(self.options, lora_rank=self.options.proposal_lora_rank)
        return BorrowingPolicy(self.loaded.model, options, self.device, split=self.mesh.size > 1)

    def _learner(self, make: Callable[..., ProposalModel], model: Any) -> ProposalModel:
        options = dataclasses.replace(self.options, enable_ema=False)
        trained = model if isinstance(model, TwistModel) else model.model
        optimiser = self._optimiser(trained, options.proposal_learning_rate, options.proposal_updates)
        return make(options, model, optimiser, self.tokenizer, self.device, self.mesh)

    def _manifest(self) -> dict:
        return super()._manifest() | {"run_name": run_name(self.options)}

    def _make_run(self, groups: dict[str, Any], sampling: Sampling, *more: Any) -> TailRun:
        files = TailFiles(self.options, self._manifest(), self.tokenizer, self.device, self.iterations, self.stores)
        measures = Measures(self.options, len(self.stores["train"]), self.stores.get(HELD_OUT))
        return TailRun(self.options, TailRoles(**groups), self.order, sampling, files, *more, measures=measures)
