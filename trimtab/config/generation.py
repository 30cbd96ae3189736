"""Groups of options of the jobs in which a model speaks or judges: batch generation, scoring, chat.

Like groups.py; names and meanings are those of OpenRLHF's batch_inference and interactive_chat.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.config.groups import PrefixOptions, SamplingOptions
from trimtab.config.option import Options, option, required
from trimtab.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TaskOptions(Options):
    """Task"""

    eval_task: str = option("generate", choices=("generate", "generate_vllm", "rm"))
    """generate: answer the prompts of --dataset (and score the answers, if a reward is named). rm: score the answers in
    --dataset with the reward model --pretrain. generate_vllm is generate."""
    # Unlike --output_path of lora-combine, which is a folder.
    output_path: str = required("FILE", "a file for the rows, for example answers.jsonl")
    """JSONL file of the rows. While they are made they stand in FILE.partial, and the same command goes on there."""
    best_of_n: int = option(1, at_least=1)
    """Answers to each prompt."""
    iter: int | None = option(None, at_least=0)
    """Take only the prompts from iter x rollout_batch_size on, rollout_batch_size of them."""
    # Unlike in RL, where it is what one iteration learns from.
    rollout_batch_size: int = option(2048, at_least=1)
    """Prompts of one --iter."""
    micro_batch_size: int = option(16, at_least=1)
    """Answers in one pass of a reward model; it changes memory and speed, not the result."""

    def check(self) -> Iterable[str]:
        if os.path.isdir(self.output_path):
            raise UserError(f"--output_path {self.output_path} is a folder: give a file, for example answers.jsonl")
        return self.idle(["rollout_batch_size"], "without --iter") if self.iter is None else ()


@dataclass(frozen=True, kw_only=True)
class ConditionOptions(Options):
    """Conditional SFT"""

    enable_csft: bool = False
    """Ask for a reward, as a model trained on csft rows expects: --csft_prompt follows every prompt."""
    csft_prompt: str = option("<rm_score>: 5.00", needs="enable_csft")
    """The words that ask for it."""

    @property
    def condition(self) -> str | None:
        """What follows every prompt, if anything does."""
        return self.csft_prompt if self.enable_csft else None


@dataclass(frozen=True, kw_only=True)
class PostProcessingOptions(ConditionOptions):
    """Conditional SFT"""

    # Unlike in RL, where the reward model's config.json holds the mean and the deviation.
    normalize_reward: bool = option(False, needs=("post_processor", "csft"))
    """Subtract the mean of all rewards and divide by their deviation before csft writes them into prompts."""
    reward_template: str | None = option(None, needs=("post_processor", "csft"))
    """How csft puts {reward}, which must be there, behind {input}; unset: '{input} <rm_score>: {reward} '."""

    def check(self) -> Iterable[str]:
        if self.reward_template is not None and "{reward}" not in self.reward_template:
            raise UserError(
                f"--reward_template {self.reward_template!r}: {{reward}} must stand where the reward should"
            )
        return ()


@dataclass(frozen=True, kw_only=True)
class SelectionOptions(Options):
    """Rewards"""

    post_processor: str | None = option(None, choices=("rs", "iter_dpo", "kto", "csft"))
    """What becomes of scored answers: rs keeps the best of each prompt (for sft), iter_dpo pairs the best with the
    worst (for dpo and rm), kto judges each by its prompt's mean (for kto), csft writes each reward into the prompt (for
    sft); unset: every answer with its reward."""


@dataclass(frozen=True, kw_only=True)
class DrawingOptions(SamplingOptions):
    """Sampling"""

    greedy_sampling: bool = False
    """Always take the most likely token."""

    def check(self) -> Iterable[str]:
        aside = [f"--{name}" for name in ("temperature", "top_p") if self.greedy_sampling and self.asks(name)]
        return [f"{', '.join(aside)} without effect: --greedy_sampling takes the most likely token"] if aside else ()


@dataclass(frozen=True, kw_only=True)
class AnswerLengthOptions(Options):
    """Sampling"""

    max_new_tokens: int = option(1024, at_least=1)
    """At most this many tokens in an answer."""


@dataclass(frozen=True, kw_only=True)
class BatchEngineOptions(PrefixOptions):
    """vLLM"""

    tp_size: int | None = option(None, at_least=1)
    """GPUs of one vLLM engine. The built-in engine has one."""
    max_num_seqs: int = option(256, at_least=1)
    """Answers that are written at once."""


@dataclass(frozen=True, kw_only=True)
class PreambleOptions(Options):
    """Conversations"""

    ta_prompt: str | None = None
    """File with text that every conversation begins with (the system turn of a chat template)."""

    def check(self) -> Iterable[str]:
        if self.ta_prompt and not os.path.isfile(os.path.expanduser(self.ta_prompt)):
            raise UserError(f"--ta_prompt: {self.ta_prompt} is not a file; check the path")
        return ()
