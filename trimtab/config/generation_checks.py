"""What checks.py says of the options in generation.py."""

import os
from collections.abc import Iterable

from trimtab.config.bounds import a_place_that_exists, above_zero, at_least, changed, one_of
from trimtab.config.generation import DrawingOptions, PreambleOptions
from trimtab.config.jobs import ChatOptions, GenerateOptions
from trimtab.errors import UserError

POST_PROCESSORS = ("rs", "iter_dpo", "kto", "csft")
_REWARDS = ("reward_pretrain", "remote_rm_url", "reward_verifier")
_OF_GENERATION = (
    *("best_of_n", "max_new_tokens", "prompt_max_len", "greedy_sampling", "temperature", "top_p", "label_key"),
    *("repetition_penalty", "enable_csft", "iter", "tp_size", "max_num_seqs", "enable_prefix_caching"),
)
_OF_SCORING = ("output_key", "value_head_prefix", "max_len")
_OF_CSFT = ("normalize_reward", "reward_template")


def _examine_drawing(options: DrawingOptions) -> Iterable[str]:
    at_least(options, 0, "temperature")
    above_zero(options, "repetition_penalty")
    if not options.greedy_sampling:
        return []
    aside = [f"--{name}" for name in ("temperature", "top_p") if changed(options, name)]
    return [f"{', '.join(aside)} without effect: --greedy_sampling takes the most likely token"] if aside else []


def _examine_preamble(options: PreambleOptions) -> Iterable[str]:
    if options.ta_prompt and not os.path.isfile(os.path.expanduser(options.ta_prompt)):
        raise UserError(f"--ta_prompt: {options.ta_prompt} is not a file; check the path")
    return []


def _examine_chat(options: ChatOptions) -> Iterable[str]:
    a_place_that_exists(options, "pretrain")
    return []


def _examine_generate(options: GenerateOptions) -> Iterable[str]:
    a_place_that_exists(options, "pretrain")
    one_of(options, "eval_task", "generate", "generate_vllm", "rm")
    if os.path.isdir(options.output_path):
        raise UserError(f"--output_path {options.output_path} is a folder: give a file, for example answers.jsonl")
    at_least(options, 1, "best_of_n", "rollout_batch_size", "micro_batch_size", "max_new_tokens", "max_num_seqs")
    at_least(options, 1, "prompt_max_len")
    if options.reward_template is not None and "{reward}" not in options.reward_template:
        raise UserError(f"--reward_template {options.reward_template!r}: {{reward}} must stand where the reward should")
    for name, least in (("iter", 0), ("tp_size", 1)):
        if getattr(options, name) is not None:
            at_least(options, least, name)
    scoring = options.eval_task == "rm"
    _check_rewards(options, scoring)
    warnings = [
        f"--{name} has no effect with --eval_task {options.eval_task}"
        for name in (_OF_GENERATION if scoring else _OF_SCORING)
        if changed(options, name)
    ]
    if options.iter is None and changed(options, "rollout_batch_size"):
        warnings.append("--rollout_batch_size has no effect without --iter")
    if options.post_processor != "csft":
        warnings += [f"--{n} has no effect without --post_processor csft" for n in _OF_CSFT if changed(options, n)]
    if not scoring and (options.eval_task == "generate_vllm" or options.tp_size is not None):
        warnings.append("the built-in engine writes the answers; vLLM is not needed")
    if options.zero_stage > 0:
        warnings.append(f"--zero_stage {options.zero_stage} has no effect: every process holds the whole model")
    return warnings


def _check_rewards(options: GenerateOptions, scoring: bool) -> None:
    named = [f"--{name}" for name in _REWARDS if getattr(options, name)]
    if scoring and named:
        raise UserError(f"with --eval_task rm the reward model is --pretrain: leave {', '.join(named)} out")
    if named and options.enable_csft:
        raise UserError(
            "--enable_csft: a reward would read the wish too; score the written answers with --eval_task rm"
        )
    if options.post_processor is None:
        return
    one_of(options, "post_processor", *POST_PROCESSORS)
    if scoring:
        return
    if not named:
        raise UserError(
            f"--post_processor {options.post_processor} needs rewards: name one (--reward_pretrain, --remote_rm_url or "
            "--reward_verifier), or score the written answers with --eval_task rm"
        )
    if options.post_processor != "csft" and options.best_of_n < 2:
        raise UserError(
            f"--post_processor {options.post_processor} compares the answers to a prompt: set --best_of_n above 1"
        )


EXAMINERS = (
    (DrawingOptions, _examine_drawing),
    (PreambleOptions, _examine_preamble),
    (ChatOptions, _examine_chat),
    (GenerateOptions, _examine_generate),
)
