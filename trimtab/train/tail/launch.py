"""From checked options to a tail run: what an RL run has, and a proposal, the start, held-out prompts, measures."""

import dataclasses
from typing import Any

from trimtab.data.prompts import Stores
from trimtab.errors import UserError
from trimtab.models.load import load_policy
from trimtab.rollout.stopping import stop_tokens
from trimtab.rollout.types import Sampling
from trimtab.train.interrupts import StopRequest
from trimtab.train.launch import load_job_tokenizer
from trimtab.train.rl.launch import Builder, check_model, rehearse_rl, train_rl
from trimtab.train.rl.learner import Actor
from trimtab.train.sharded import shard_trained
from trimtab.train.tail.files import TailFiles
from trimtab.train.tail.loop import TailRoles, TailRun
from trimtab.train.tail.measures import BadWords, Measures, bad_tokens
from trimtab.train.tail.prompts import HELD_OUT, load_tail_stores
from trimtab.train.tail.proposal import ProposalModel, TailActor


def train_tail(options: Any) -> None:
    train_rl(options, TailBuilder)


def rehearse_tail(options: Any) -> list[str]:
    lines = rehearse_rl(options, load_tail_stores, options.num_episodes * options.fit_steps)
    if options.analytic_bad_word_calc:
        try:
            bad_tokens(options, load_job_tokenizer(options))
        except UserError as error:
            lines.append(f"warning: {error}")
    return lines


class TailBuilder(Builder):
    @property
    def actor_class(self) -> type[Actor]:
        return Actor if self.options.method == "ppo" else TailActor

    def _episodes(self) -> int:
        return self.options.num_episodes * self.options.fit_steps

    def _load_stores(self) -> Stores:
        return load_tail_stores(self.options, self.tokenizer)

    def _roles(self, stop: StopRequest) -> dict[str, Any]:
        options = self.options
        bad = bad_tokens(options, self.tokenizer) if options.analytic_bad_word_calc else None
        roles = super()._roles(stop)
        if HELD_OUT in self.stores:
            roles["start"] = roles.get("reference") or self._scorer(None)
        if options.method == "repulse":
            roles["proposal"] = self._proposal()
            roles["proposal_rollouts"] = self._rollouts(roles["proposal"].model, stop)
        if bad is not None:
            policy = self.loaded.model
            prompt, stops = self.stores["train"].ids(0), stop_tokens(policy, self.tokenizer)
            roles["bad_words"] = BadWords(policy, prompt, bad, options.generate_max_len, stops)
        return roles

    def _proposal(self) -> ProposalModel:
        """A second model, from the same weights as the policy."""
        options = dataclasses.replace(self.options, lora_rank=0)
        model = load_policy(options, self.device, cast=self.world.size == 1).model
        check_model(model, options, self.stores)
        shard_trained(model, options, self.world)
        optimiser = self._optimiser(model.model, options.proposal_learning_rate, options.proposal_updates)
        return ProposalModel(options, model, optimiser, self.tokenizer, self.device, self.world)

    def _make_run(self, groups: dict[str, Any], sampling: Sampling, *more: Any) -> TailRun:
        files = TailFiles(self.options, self._manifest(), self.tokenizer, self.device, self.iterations)
        measures = Measures(self.options, len(self.stores["train"]), self.stores.get(HELD_OUT))
        return TailRun(self.options, TailRoles(**groups), self.order, sampling, files, *more, measures=measures)
