"""Groups of options of an attack: what is attacked, how a suffix is searched for, what counts as success.

Like groups.py. Names are those of RePULSe's evaluate_gcg_sz.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.config.option import Options, option, required
from trimtab.errors import UserError


@dataclass(frozen=True, kw_only=True)
class RewardInputOptions(Options):
    """Rewards"""

    reward_input: str | None = option(None, choices=("pair", "text", "chat"))
    """What the reward model reads: pair (question and answer as its two inputs), text (both as one) or chat (its own
    chat template); unset: chat for a decoder, pair for an encoder."""
    rm_max_len: int = option(2048, at_least=8)
    """At most this many tokens of a pair or a text are read; the question is shortened, not the answer."""


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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
