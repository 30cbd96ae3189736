"""Groups of options of the jobs in which a model speaks or judges: batch generation, scoring, chat.

Like groups.py; names and meanings are those of OpenRLHF's batch_inference and interactive_chat.
"""

from dataclasses import dataclass

from trimtab.config.groups import PrefixOptions, SamplingOptions, required


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Task"""

    eval_task: str = "generate"
    """generate: answer the prompts of --dataset (and score the answers, if a reward is named). rm: score the answers in
    --dataset with the reward model --pretrain. generate_vllm is generate."""
    # Unlike --output_path of lora-combine, which is a folder.
    output_path: str | None = required("FILE", "a file for the rows, for example answers.jsonl")
    """JSONL file of the rows. While they are made they stand in FILE.partial, and the same command goes on there."""
    best_of_n: int = 1
    """Answers to each prompt."""
    iter: int | None = None
    """Take only the prompts from iter x rollout_batch_size on, rollout_batch_size of them."""
    # Unlike in RL, where it is what one iteration learns from.
    rollout_batch_size: int = 2048
    """Prompts of one --iter."""
    micro_batch_size: int = 16
    """Answers in one pass of a reward model; it changes memory and speed, not the result."""


@dataclass(frozen=True, kw_only=True)
class ConditionOptions:
    """Conditional SFT"""

    enable_csft: bool = False
    """Ask for a reward, as a model trained on csft rows expects: --csft_prompt follows every prompt."""
    csft_prompt: str = "<rm_score>: 5.00"
    """The words that ask for it."""

    @property
    def condition(self) -> str | None:
        """What follows every prompt, if anything does."""
        return self.csft_prompt if self.enable_csft else None


@dataclass(frozen=True, kw_only=True)
class PostProcessingOptions(ConditionOptions):
    """Conditional SFT"""

    # Unlike in RL, where the reward model's config.json holds the mean and the deviation.
    normalize_reward: bool = False
    """Subtract the mean of all rewards and divide by their deviation before csft writes them into prompts."""
    reward_template: str | None = None
    """How csft puts {reward}, which must be there, behind {input}; unset: '{input} <rm_score>: {reward} '."""


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    """Rewards"""

    post_processor: str | None = None
    """What becomes of scored answers: rs keeps the best of each prompt (for sft), iter_dpo pairs the best with the
    worst (for dpo and rm), kto judges each by its prompt's mean (for kto), csft writes each reward into the prompt (for
    sft); unset: every answer with its reward."""


@dataclass(frozen=True, kw_only=True)
class DrawingOptions(SamplingOptions):
    """Sampling"""

    greedy_sampling: bool = False
    """Always take the most likely token."""
    repetition_penalty: float = 1.0
    """Tokens that were there before are made less likely by this factor; 1: not."""


@dataclass(frozen=True, kw_only=True)
class AnswerLengthOptions:
    """Sampling"""

    max_new_tokens: int = 1024
    """At most this many tokens in an answer."""


@dataclass(frozen=True, kw_only=True)
class BatchEngineOptions(PrefixOptions):
    """vLLM"""

    tp_size: int | None = None
    """GPUs of one engine. The built-in engine does the work, one in every process."""
    max_num_seqs: int = 256
    """Answers that are written at once."""


@dataclass(frozen=True, kw_only=True)
class PreambleOptions:
    """Conversations"""

    ta_prompt: str | None = None
    """File with text that every conversation begins with (the system turn of a chat template)."""
