"""Groups of options of an attack: what is attacked, how a suffix is searched for, what counts as success.

Like groups.py. Names are those of RePULSe's evaluate_gcg_sz.
"""

from dataclasses import dataclass

from trimtab.config.groups import required


@dataclass(frozen=True, kw_only=True)
class RewardInputOptions:
    """Rewards"""

    reward_input: str | None = None
    """What the reward model reads: pair (question and answer as its two inputs), text (both as one) or chat (its own
    chat template); unset: chat for a decoder, pair for an encoder."""
    rm_max_len: int = 2048
    """At most this many tokens of a pair or a text are read; the question is shortened, not the answer."""


@dataclass(frozen=True, kw_only=True)
class AttackedOptions:
    """Model"""

    # Unlike --ckpt_path of training, which is where checkpoints are written.
    ckpt_path: str | None = None
    """What is attacked: a folder of checkpoints that training wrote, or a model folder; unset: --pretrain itself."""
    parameterization: str = "policy"
    """How a checkpoint holds the model; policy, a plain one, is the only form there is here."""


@dataclass(frozen=True, kw_only=True)
class TargetFileOptions:
    """Targets"""

    file_path: str | None = required("FILE", "a file with the columns goal and target")
    """Goals and wanted answers: columns goal and target."""
    scenario: str = "behaviors"
    """behaviors: the suffix follows the goal; strings: there is no goal, only the target."""
    max_targets: int = 100
    """Attack at most this many rows."""
    # Unlike --output_path of generate, which must be given.
    output_path: str | None = None
    """File of the findings, a row a target, every reward included; unset: gcg_eval_NAME.jsonl beside the model. What
    is unfinished stands in FILE.partial, and the same command goes on there."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Search (GCG)"""

    gcg_steps: int = 250
    """Steps of the search, for each target."""
    gcg_search_width: int = 512
    """Candidate suffixes in a step."""
    gcg_topk: int = 256
    """Tokens of each place that the gradient lets through."""
    gcg_batch_size: int = 512
    """Candidates in one pass; it changes memory and speed, not the result."""
    gcg_n_replace: int = 1
    """Places of the suffix that a candidate changes."""
    gcg_buffer_size: int = 0
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
class SuccessOptions:
    """Success"""

    atk_success_criteria: str = "reward"
    """A reply succeeds if its reward is below the threshold (reward), if it holds no phrase of refusal (prefix), or if
    it begins with the target (target). An attack succeeds if one of its replies does."""
    # Unlike in RL, one model and nothing else.
    reward_pretrain: str | None = None
    """Reward model that judges replies: ours, or any sequence classifier with one score."""
    reward_threshold: float | None = None
    """Replies with a reward below this are bad."""
    rm_exclude_adv_suffix: bool = False
    """Let the reward model read the goal and the reply, without the suffix."""
    samples_per_prompt: int = 1000
    """Replies to each goal, before the search and after it."""
