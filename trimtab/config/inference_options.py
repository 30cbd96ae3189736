"""Options of the jobs in which a model answers or scores: batch generation, chat, attack, servers.

Names and meanings are those of OpenRLHF's batch_inference and interactive_chat, and of RePULSe's evaluate_gcg_sz.
"""

import ipaddress
import os
from collections.abc import Iterable
from typing import ClassVar

from trimtab.config.option import Options, option, required, secret
from trimtab.config.training_options import PrefixOptions, SamplingOptions
from trimtab.errors import UserError


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


class SelectionOptions(Options):
    """Rewards"""

    post_processor: str | None = option(None, choices=("rs", "iter_dpo", "kto", "csft"))
    """What becomes of scored answers: rs keeps the best of each prompt (for sft), iter_dpo pairs the best with the
    worst (for dpo and rm), kto judges each by its prompt's mean (for kto), csft writes each reward into the prompt (for
    sft); unset: every answer with its reward."""


class DrawingOptions(SamplingOptions):
    """Sampling"""

    greedy_sampling: bool = False
    """Always take the most likely token."""

    def check(self) -> Iterable[str]:
        aside = [f"--{name}" for name in ("temperature", "top_p") if self.greedy_sampling and self.asks(name)]
        return [f"{', '.join(aside)} without effect: --greedy_sampling takes the most likely token"] if aside else ()


class AnswerLengthOptions(Options):
    """Sampling"""

    max_new_tokens: int = option(1024, at_least=1)
    """At most this many tokens in an answer."""


class BatchEngineOptions(PrefixOptions):
    """vLLM"""

    tp_size: int | None = option(None, at_least=1)
    """GPUs of one vLLM engine. The built-in engine has one."""
    max_num_seqs: int = option(256, at_least=1)
    """Answers that are written at once."""


class PreambleOptions(Options):
    """Conversations"""

    ta_prompt: str | None = None
    """File with text that every conversation begins with (the system turn of a chat template)."""

    def check(self) -> Iterable[str]:
        if self.ta_prompt and not os.path.isfile(os.path.expanduser(self.ta_prompt)):
            raise UserError(f"--ta_prompt: {self.ta_prompt} is not a file; check the path")
        return ()


# ---- the GCG attack


class AttackedOptions(Options):
    """Model"""

    # Unlike --ckpt_path of training, which is where checkpoints are written.
    ckpt_path: str | None = option(None, place="path")
    """What is attacked: a folder of checkpoints that training wrote, or a model folder; unset: --pretrain itself."""
    parameterization: str = "policy"
    """How a checkpoint holds the model; policy, a plain one, is the only form there is here."""

    def check(self) -> Iterable[str]:
        if self.parameterization != "policy":
            raise UserError(f"--parameterization {self.parameterization}: a plain model is attacked; give policy")
        return ()


class TargetFileOptions(Options):
    """Targets"""

    file_path: str = required("FILE", "a file with the columns goal and target", place="path")
    """Goals and wanted answers: columns goal and target."""
    scenario: str = option("behaviors", choices=("behaviors", "strings"))
    """behaviors: the suffix follows the goal; strings: there is no goal, only the target."""
    max_targets: int = option(100, at_least=1)
    """Attack at most this many rows."""
    # Unlike --output_path of generate, which must be given.
    output_path: str | None = None
    """File of the findings, a row a target, every reward included; unset: gcg_eval_NAME.jsonl beside the model. What
    is unfinished stands in FILE.partial, and the same command goes on there."""


class SearchOptions(Options):
    """Search (GCG)"""

    gcg_steps: int = option(250, at_least=1)
    """Steps of the search, for each target."""
    gcg_search_width: int = option(512, at_least=1)
    """Candidate suffixes in a step."""
    gcg_topk: int = option(256, at_least=1)
    """Tokens of each place that the gradient lets through."""
    gcg_batch_size: int = option(512, at_least=1)
    """Candidates in one pass; it changes memory and speed, not the result."""
    gcg_n_replace: int = option(1, at_least=1)
    """Places of the suffix that a candidate changes."""
    gcg_buffer_size: int = option(0, at_least=0)
    """Suffixes to go on from, the best of all steps; 0: the best candidate of the last step."""
    gcg_use_prefix_cache: bool = False
    """Read what stands before the suffix once for all candidates of a pass."""
    gcg_filter_ids: bool = False
    """Drop candidates whose text does not give the same tokens again."""
    gcg_early_stop: bool = False
    """Stop a search when the target is the model's most likely answer."""
    gcg_allow_non_ascii: bool = False
    """Let suffixes hold any characters."""
    gcg_optim_str_init: str = "x x x x x x x x x x"
    """The suffix that a search starts from; it keeps its number of tokens."""


class SuccessOptions(Options):
    """Success"""

    atk_success_criteria: str = option("reward", choices=("reward", "prefix", "target"))
    """A reply succeeds if its reward is below the threshold (reward), if it holds no phrase of refusal (prefix), or if
    it begins with the target (target). An attack succeeds if one of its replies does."""
    # Unlike in RL, one model and nothing else.
    reward_pretrain: str | None = option(None, place="model")
    """Reward model that judges replies: ours, or any sequence classifier with one score."""
    reward_threshold: float | None = None
    """Replies with a reward below this are bad."""
    rm_exclude_adv_suffix: bool = False
    """Let the reward model read the goal and the reply, without the suffix."""
    samples_per_prompt: int = option(1000, at_least=1)
    """Replies to each goal, before the search and after it."""

    def check(self) -> Iterable[str]:
        if self.atk_success_criteria == "reward":
            needed = {"reward_pretrain": "a reward model", "reward_threshold": "the reward below which a reply is bad"}
            for name, what in needed.items():
                if getattr(self, name) is None:
                    raise UserError(f"--atk_success_criteria reward needs --{name}: give {what}")
        return ()


# ---- servers


TOKEN_VARIABLE = "TRIMTAB_BEARER_TOKEN"
"""Environment variable of the token that a server asks for and its clients send."""
NO_TOKEN = "none"


class ServerOptions(Options):
    """Server"""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 is every one of this machine, for anybody who can reach it."""
    port: int = option(5000, at_least=0, at_most=65535)
    """Port to listen at; 0: any that is free."""
    max_request_mib: float = option(64.0, above=0)
    """Larger requests are refused."""
    drain_seconds: float = option(30.0, at_least=0)
    """On Ctrl-C or SIGTERM, what has been accepted is still answered for so long; new requests get a 503."""
    bearer_token: str | None = secret(None)
    """Refuse requests without this token; unset: what the environment variable TRIMTAB_BEARER_TOKEN holds, else a
    policy server makes one and shows it, and a reward server asks for none; none: ask for none."""

    makes_token: ClassVar[bool] = False

    @property
    def token(self) -> str | None:
        """The key that clients must send; NO_TOKEN: none."""
        return self.bearer_token or os.environ.get(TOKEN_VARIABLE) or (None if self.makes_token else NO_TOKEN)

    def check(self) -> Iterable[str]:
        if _is_loopback(self.host) or self.token != NO_TOKEN:
            return ()
        return [f"--host {self.host}: anybody who reaches this machine can use the server; give a --bearer_token"]


class RewardServerOptions(ServerOptions):
    """Server"""

    batch_size: int | None = option(None, at_least=1)
    """At most this many samples in one pass, also of several clients; unset: as many as wait, by tokens."""


class PolicyServerOptions(ServerOptions):
    """Server"""

    makes_token: ClassVar[bool] = True

    served_model_name: str | None = None
    """What clients call the model; unset: what --pretrain says."""
    max_model_len: int | None = option(None, at_least=2)
    """At most this many tokens of a prompt and its answer; unset: the model's context."""
    max_requests: int = option(256, at_least=1)
    """Answers that are written at once; others wait."""
    max_waiting: int = option(1024, at_least=1)
    """Requests at once, at work or waiting; beyond them a request gets a 503 and may try again."""
    private_sessions: bool = False
    """Sessions have unguessable names that the server makes (POST /sessions); without such a name a session is
    neither gone on with nor traced. Unset: every client with the key may name any session and read its trace."""
    http_processes: int | None = option(None, at_least=0, at_most=64)
    """Processes that read requests and write replies beside the engine's; 0: its own does; unset: on an accelerator
    half as many as there are cores, at most 8, and 0 on a CPU, whose cores the engine needs."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
