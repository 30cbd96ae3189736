"""What checks.py says of the options in attack.py."""

from collections.abc import Iterable

from trimtab.config.attack import RewardInputOptions, SearchOptions, SuccessOptions
from trimtab.config.bounds import a_place_that_exists, at_least, changed, one_of, place_exists
from trimtab.config.jobs import AttackOptions
from trimtab.errors import UserError

_OF_TRAINING = ("gradient_checkpointing", "gradient_checkpointing_use_reentrant", "use_liger_kernel", "aux_loss_coef")
_OF_THE_REWARD_MODEL = (
    *("reward_threshold", "rm_exclude_adv_suffix", "normalize_reward"),
    *("reward_input", "rm_max_len", "value_head_prefix"),
)


def _examine_search(options: SearchOptions) -> Iterable[str]:
    at_least(options, 1, "gcg_steps", "gcg_search_width", "gcg_topk", "gcg_batch_size", "gcg_n_replace")
    at_least(options, 0, "gcg_buffer_size")
    return []


def _examine_success(options: SuccessOptions) -> Iterable[str]:
    one_of(options, "atk_success_criteria", "reward", "prefix", "target")
    at_least(options, 1, "samples_per_prompt")
    a_place_that_exists(options, "reward_pretrain")
    if options.atk_success_criteria == "reward":
        needed = {"reward_pretrain": "a reward model", "reward_threshold": "the reward below which a reply is bad"}
        for name, what in needed.items():
            if getattr(options, name) is None:
                raise UserError(f"--atk_success_criteria reward needs --{name}: give {what}")
    return []


def _examine_reward_input(options: RewardInputOptions) -> Iterable[str]:
    at_least(options, 8, "rm_max_len")
    if options.reward_input is not None:
        one_of(options, "reward_input", "pair", "text", "chat")
    return []


def _examine_attack(options: AttackOptions) -> Iterable[str]:
    a_place_that_exists(options, "pretrain")
    place_exists(options.file_path, "--file_path")
    if options.ckpt_path:
        place_exists(options.ckpt_path, "--ckpt_path")
    one_of(options, "scenario", "behaviors", "strings")
    at_least(options, 1, "max_targets", "max_new_tokens")
    if options.parameterization != "policy":
        raise UserError(f"--parameterization {options.parameterization}: a plain model is attacked; give policy")
    if options.nproc > 1:
        raise UserError("--nproc: an attack runs in one process; start one for each part of --file_path")
    why = dict.fromkeys(_OF_TRAINING, "in an attack: nothing is trained")
    if options.reward_pretrain is None:
        why |= dict.fromkeys(_OF_THE_REWARD_MODEL, "without --reward_pretrain")
    return [f"--{name} has no effect {reason}" for name, reason in why.items() if changed(options, name)]


EXAMINERS = (
    (SearchOptions, _examine_search),
    (SuccessOptions, _examine_success),
    (RewardInputOptions, _examine_reward_input),
    (AttackOptions, _examine_attack),
)
