"""From checked options to a tail run: what an RL run has, and a proposal, the start, held-out prompts, measures."""

from typing import Any

from trimtab.config.jobs import TailOptions
from trimtab.config.repulse_spelling import run_name
from trimtab.data.prompts import Stores
from trimtab.distributed.launcher import Group, Unit
from trimtab.errors import UserError
from trimtab.evaluate.bad_words import check_countable
from trimtab.models.load import fake_policy
from trimtab.models.policy import Policy
from trimtab.rollout.sampling import SamplingParams
from trimtab.train.launch import load_job_tokenizer
from trimtab.train.rl.launch import Controller, rehearse_rl, train_rl
from trimtab.train.rl.rollout_client import RolloutClient
from trimtab.train.rl.source import RolloutSource
from trimtab.train.tail.description import tail_units_of
from trimtab.train.tail.files import TailFiles
from trimtab.train.tail.loop import TailRoles, TailRun
from trimtab.train.tail.measures import Measures, bad_tokens
from trimtab.train.tail.prompts import HELD_OUT, load_tail_stores


def train_tail(options: TailOptions) -> None:
    train_rl(options, TailController)


def rehearse_tail(options: TailOptions) -> list[str]:
    lines = rehearse_rl(options, load_tail_stores, options.num_episodes * options.fit_steps, tail_units_of)
    if options.analytic_bad_word_calc:
        try:
            bad = bad_tokens(options, load_job_tokenizer(options))
        except UserError as error:
            return [*lines, f"warning: {error}"]
        check_countable(vocabulary_of(fake_policy(options)), bad, options.generate_max_len)
    return lines


def vocabulary_of(policy: Policy) -> int:
    return policy.config.get_text_config().vocab_size


class TailController(Controller):
    options: TailOptions

    @staticmethod
    def units(options: TailOptions, processes: int) -> list[Unit]:
        return tail_units_of(options, processes)

    def episodes(self) -> int:
        return self.options.num_episodes * self.options.fit_steps

    def load_stores(self) -> Stores:
        return load_tail_stores(self.options, self.tokenizer)

    def check_models(self) -> None:
        super().check_models()
        if self.options.analytic_bad_word_calc:
            bad = bad_tokens(self.options, self.tokenizer)
            check_countable(vocabulary_of(fake_policy(self.options)), bad, self.options.generate_max_len)

    def manifest(self, actor: dict[str, Any], reward: str) -> dict:
        return super().manifest(actor, reward) | {"run_name": run_name(self.options)}

    def make_run(
        self,
        groups: dict[str, Group],
        asking: RolloutClient,
        supply: RolloutSource,
        sampling: SamplingParams,
        manifest: dict,
        *more: Any,
    ) -> TailRun:
        files = TailFiles(self.options, manifest, self.tokenizer, self.iterations, self.stores)
        store = self.stores["train"]
        measures = Measures(self.options, len(store), store.ids(0), self.stores.get(HELD_OUT))
        parts = self.options, TailRoles(**groups), asking, supply, self.order, files, *more
        return TailRun(*parts, sampling=sampling, measures=measures)
