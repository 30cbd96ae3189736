"""PaddleNLP's file for GRPO, REINFORCE++ or PPO in the words of `trimtab rl`.

What each key becomes is the table of paddle_keys.py; here are the keys that are read together. Once a file is
PaddleNLP's, every key of it goes through the table alone: names that both sides have need not mean the same.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from trimtab.config.groups import Origin
from trimtab.config.paddle_file import Entry, PaddleFile
from trimtab.config.paddle_keys import KEYS, found
from trimtab.config.rl_jobs import RLOptions

_MARKS = {"rl_algorithm", "actor_model_name_or_path", "use_rm_server", "train_datasets"}
"""Keys that no file of ours has: one of them makes a file PaddleNLP's."""
_ESTIMATORS = {"grpo": "group_norm", "reinforce_plus_plus": "reinforce", "ppo": "gae"}
_REWARDS = ("reward_pretrain", "reward_func", "remote_rm_url", "reward_verifier", "replay")
_STAGES = {"stage1": 1, "stage2": 2, "stage3": 3}
_KEPT = {"full": "nothing", "full_attn": "products", "core_attn": "products"}
_OFFLOADED = ("freeze_model", "train_model", "optimizer")
_COUNTS = (
    *("global_batch_size", "rollout_n", "update_iters", "logging_steps", "save_steps", "eval_steps"),
    *(f"per_device_{what}_batch_size" for what in ("train", "logprob", "reward", "value")),
)
_LOGGERS = ("visualdl", "tensorboard", "wandb")
_UNCLIPPED = (-1e9, 1e9)
_ALWAYS = ("balance_batch", "use_remove_padding", "use_flash_attention", "use_fp32_compute")

Chosen = dict[str, Any]


def with_config(words: Sequence[str]) -> list[str]:
    """The words of PaddleNLP's run_rl, which may begin with a file, as those of `trimtab rl`."""
    return ["--config", *words] if words and not words[0].startswith("-") else list(words)


def is_paddle(entries: Sequence[Entry]) -> bool:
    """Whether a file is one of PaddleNLP's."""
    return any(name in _MARKS for _, name, _ in entries)


def in_our_words(
    job_class: type, path: str, entries: Sequence[Entry], on_the_line: Mapping[str, Any]
) -> tuple[Chosen, list[str], tuple[Origin, ...]]:
    """The options that a file asks for, what there is to say about it, and where each option comes from.
    `on_the_line`: what the command line has, which wins."""
    file = PaddleFile(job_class, path, entries, on_the_line)
    options = {key.option: file[key.name] for key in KEYS.values() if key.option and file[key.name] is not None}
    notes = list(_without_meaning(file))
    for part in (
        _counts,
        _method,
        _rewards,
        _loggers,
        _data,
        _layout,
        _sampling,
        _steps,
        _optimiser,
        _objective,
        _memory,
    ):
        notes += part(file, options)
    return options, notes, file.origins


def accumulation(options: RLOptions) -> Iterator[str]:
    """How many passes a process makes for an optimiser step: PaddleNLP derives that, and so do we."""
    group, micro = options.n_samples_per_prompt, options.micro_train_batch_size
    if min(group, micro, options.ring_attn_size, options.ds_tensor_parallel_size) < 1:
        return  # of the command line, which is checked after this
    answers = min(options.train_batch_size, options.rollout_batch_size * group)
    processes = options.data_parts(int(os.environ.get("WORLD_SIZE", options.processes)))
    passes = math.ceil(answers / (micro * processes))
    shared = "1 data-parallel process" if processes == 1 else f"{processes} data-parallel processes"
    yield (
        f"gradient accumulation {passes}: {answers // group} prompts x {group} answers / {micro} in a pass / {shared}"
    )


def _without_meaning(file: PaddleFile) -> Iterator[str]:
    """A line for each reason, with the keys that have no meaning for it."""
    reasons: dict[str, list[str]] = {}
    for name in file.lines:
        key = found(name)
        if key is not None and key.noted:
            reasons.setdefault(key.here, []).append(name)
    for why, names in reasons.items():
        yield f"{', '.join(names)}: {why.replace('`', '')}"
    if off := [name for name in _ALWAYS if file.says(name) and not file[name]]:
        yield f"{', '.join(off)} false: always done here"


# ---- keys that are read together: each function adds to the options and tells what there is to say


def _counts(file: PaddleFile, options: Chosen) -> Iterable[str]:
    for name in _COUNTS:
        if file[name] is not None and file[name] < 1:
            file.refuse(name, "it must be at least 1")
    return ()


def _method(file: PaddleFile, options: Chosen) -> Iterator[str]:
    if file.method not in _ESTIMATORS:
        file.refuse("rl_algorithm", f"it must be one of {', '.join(_ESTIMATORS)}")
    if not file.says("rl_algorithm"):
        yield f"rl_algorithm is not in the file: {file.method}, as in PaddleNLP"
    if not file["do_train"]:
        file.refuse("do_train", "this command trains; leave it out")
    options["advantage_estimator"] = _ESTIMATORS[file.method]
    if file.method != "ppo":
        critics = [name for name in file.lines if name.startswith("critic_") and file.says(name)]
        if critics:
            yield f"{', '.join(critics)}: {file.method} has no critic"
        return
    yield "ppo's lambda is that of --lambd, 1 if it is not given: no key says it"
    options["critic_learning_rate"] = file["critic_learning_rate"] or file["learning_rate"]
    _copy(
        file, options, critic_model_name_or_path="critic_pretrain", per_device_value_batch_size="micro_value_batch_size"
    )
    options["value_clip"] = file["clip_range_value"]
    for name in ("lr_scheduler_type", "weight_decay", "warmup_ratio", "recompute", "recompute_granularity"):
        if file.says(f"critic_{name}") and file[f"critic_{name}"] != file[name]:
            file.refuse(f"critic_{name}", f"the critic shares the policy's {name}, which is {file[name]}")


def _rewards(file: PaddleFile, options: Chosen) -> Iterator[str]:
    model, server = file["reward_model_name_or_path"], file["reward_server"]
    if instead := [name for name in _REWARDS if name in file.on_the_line]:
        if server and instead != ["remote_rm_url"]:
            yield f"reward_server {server} is not asked: --{instead[0]} of the command line takes its place"
    elif file["use_rm_server"]:
        if server is None:
            file.refuse("reward_server", "use_rm_server is true; give its address, such as http://127.0.0.1:8731")
        options["remote_rm_url"] = server
        if model:
            yield f"reward_model_name_or_path {model} is not used: use_rm_server is true"
    elif model:
        options["reward_pretrain"] = model
        _copy(file, options, per_device_reward_batch_size="micro_reward_batch_size")
    elif file["use_rule_reward"]:
        file.refuse("use_rule_reward", "name the rule on the command line, for example --reward_verifier gsm8k:1.0")
    else:
        file.refuse("reward_model_name_or_path", "use_rm_server is false, so a reward model is needed")


def _loggers(file: PaddleFile, options: Chosen) -> Iterator[str]:
    named = file["report_to"]
    if unknown := [name for name in named if name not in (*_LOGGERS, "all", "none")]:
        file.refuse("report_to", f"{unknown[0]} is none of all, none, {', '.join(_LOGGERS)}")
    wanted = [name for name in _LOGGERS if name in named or "all" in named]
    if "all" in named or not file.says("report_to"):
        # Nobody has named these: what is not installed is not missed.
        absent = [name for name in wanted if find_spec(name) is None]
        wanted = [name for name in wanted if name not in absent]
        if absent:
            yield f"report_to {' '.join(named)}: {', '.join(absent)} is not installed, and metrics.jsonl has everything"
    folder = file["logging_dir"] or f"{file['output_dir'] or '.'}/runs"
    options |= {f"use_{name}": folder for name in wanted if name != "wandb"}
    if "wandb" in wanted:
        options["use_wandb"] = "True"
        _copy(file, options, wandb_http_proxy="wandb_http_proxy")
    if wanted:
        _copy(file, options, run_name="wandb_run_name")


def _data(file: PaddleFile, options: Chosen) -> Iterator[str]:
    options["truncate_prompts"] = True
    if "reward_pretrain" not in options:
        options["label_key"] = file["response_key"]
    if not file["dataloader_shuffle"]:
        options["no_shuffle"] = True
    longest, together = file["max_length"], file.now("max_prompt_len") + file.now("max_dec_len")
    if longest is None:
        return
    if longest < together:
        file.refuse("max_length", f"it must be above max_prompt_len + max_dec_len, which is {together}")
    if longest == together:
        yield f"max_length {longest} is max_prompt_len + max_dec_len, and PaddleNLP asks for more: nothing is cut here"


def _layout(file: PaddleFile, options: Chosen) -> Iterator[str]:
    for name in ("pipeline_parallel_degree", "virtual_pp_degree"):
        if file[name] > 1:
            file.refuse(name, "there are no pipelines here; use tensor_parallel_degree and sharding")
    tensor = max(1, file["tensor_parallel_degree"])
    options["ds_tensor_parallel_size"] = tensor
    if file["rollout_tensor_parallel_degree"] not in (-1, tensor):
        file.refuse("rollout_tensor_parallel_degree", f"the trained weights sample, in {tensor} parts")
    if file["sequence_parallel"] and tensor > 1:
        yield "sequence_parallel: layers that are cut keep whole rows between them; only memory differs"
    words, degree = file["sharding"] or [], file["sharding_parallel_degree"]
    if unknown := [word for word in words if word not in (*_STAGES, "offload")]:
        file.refuse("sharding", f"{unknown[0]} is none of {', '.join(_STAGES)} and offload")
    stage = max((_STAGES.get(word, 0) for word in words), default=0)
    options["zero_stage"] = 0 if degree == 1 else stage
    if options["zero_stage"] and degree > 1:
        options["shard_size"] = degree
    if "offload" in words or file["offload_optim"]:
        options["adam_offload"] = True


def _sampling(file: PaddleFile, options: Chosen) -> Iterable[str]:
    for name in ("rollout_quant_type", "quant_type"):
        if file[name] not in (None, "weight_only_int8"):
            file.refuse(name, "it must be weight_only_int8 or empty")
        if file[name]:
            options["weight_only_int8"] = True
    if not file["dynamic_sampling"]:
        return ()
    options |= {"dynamic_filtering": True, "dynamic_filtering_rule": "differing"}
    if file["global_gen_batch_size"] > 0:
        options["vllm_generate_batch_size"] = file["global_gen_batch_size"]
    if file["max_gen_batches"] > 0:
        options["dynamic_filtering_batches"] = file["max_gen_batches"]
    return ()


def _steps(file: PaddleFile, options: Chosen) -> Iterator[str]:
    """Batches, and what is counted in steps: PaddleNLP's are optimiser steps, ours rollouts with all their updates."""
    micro = file["per_device_train_batch_size"]
    options |= {"micro_train_batch_size": micro, "micro_rollout_batch_size": micro}
    options["train_batch_size"] = file.prompts_at_once * file.now("rollout_n")
    options["logging_steps"] = file.iterations("logging_steps")
    counted = ["logging_steps"]
    if file["save_strategy"] not in ("steps", "no"):
        file.refuse("save_strategy", "give steps and save_steps, or no")
    if file["save_strategy"] == "steps":
        options["save_steps"] = file.iterations("save_steps")
        counted.append("save_steps")
        if file["ignore_save_lr_and_optim"]:
            options |= {"disable_ds_ckpt": True, "save_hf_ckpt": True}
    if file["max_steps"] > 0:
        # As often through the prompts as that takes: an episode has an iteration or more.
        options["max_steps"] = options["num_episodes"] = file.iterations("max_steps")
        counted.append("max_steps")
        if file.says("num_train_epochs"):
            yield f"max_steps {file['max_steps']} says how long, and not num_train_epochs, as in PaddleNLP"
    elif file["num_train_epochs"] < 1 or file["num_train_epochs"] % 1:
        file.refuse("num_train_epochs", "give a whole number of at least 1, or max_steps")
    else:
        options["num_episodes"] = int(file["num_train_epochs"])
    strategy, evaluated = file["evaluation_strategy"], file.on_the_line.get("eval_dataset", file["eval_datasets"])
    if strategy not in ("steps", "epoch", "no"):
        file.refuse("evaluation_strategy", "it must be steps, epoch or no")
    wanted = file["do_eval"] or strategy != "no"
    if wanted and not evaluated:
        yield "nothing is evaluated: there are no eval_datasets"
    elif wanted:
        options |= {"eval_dataset": evaluated, "eval_temperature": 0.0, "eval_n_samples_per_prompt": 1}
        if strategy == "steps":
            name = "eval_steps" if file.says("eval_steps") else "logging_steps"
            options["eval_steps"] = file.iterations(name)
            counted.append(name)
    if file.updates > 1:
        said = ", ".join(f"{name} {file[name]}" for name in dict.fromkeys(counted))
        made = ", ".join(str(file.iterations(name)) for name in dict.fromkeys(counted))
        yield f"PaddleNLP counts each of an iteration's {file.updates} updates as a step: {said} are {made} iterations"


def _optimiser(file: PaddleFile, options: Chosen) -> Iterable[str]:
    options["adam_betas"] = (file["adam_beta1"], file["adam_beta2"])
    if file["warmup_steps"] > 0:
        if file["max_steps"] <= 0:
            file.refuse("warmup_steps", "without max_steps it is no share of the run; give warmup_ratio")
        options["lr_warmup_ratio"] = file["warmup_steps"] / file["max_steps"]
    if file["decay_steps"] not in (None, file["max_steps"]) and file["lr_scheduler_type"] != "constant":
        file.refuse("decay_steps", f"the rate falls until the run ends, at max_steps, which is {file['max_steps']}")
    least, peak = file["min_learning_rate"], file["learning_rate"]
    if least is not None and file["lr_scheduler_type"] == "cosine":
        if peak <= 0:
            file.refuse("learning_rate", "it must be above 0")
        options |= {"lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": least / peak}
    elif least is not None and file["lr_scheduler_type"] == "linear":
        file.refuse("min_learning_rate", "lr_scheduler_type linear ends at 0 here; use cosine, or leave it out")
    lowest = file["critic_min_learning_rate"]
    if file.method == "ppo" and lowest is not None and file["lr_scheduler_type"] == "cosine":
        share = options.get("min_lr_ratio", 0.0)
        if not math.isclose(lowest, share * options["critic_learning_rate"]):
            file.refuse("critic_min_learning_rate", f"the critic ends at the policy's share of the peak, {share:g}")
    return ()


def _objective(file: PaddleFile, options: Chosen) -> Iterator[str]:
    grouped, bound = file.method == "grpo", file["clip_range_score"]
    if bound <= 0:
        file.refuse("clip_range_score", "it must be above 0")
    weight, other = ("kl_loss_coeff", "kl_coeff") if grouped else ("kl_coeff", "kl_loss_coeff")
    options["init_kl_coef"] = file[weight]
    options["reward_clip_range"] = _UNCLIPPED if grouped else (-bound, bound)
    if grouped and file[weight]:
        options |= {"use_kl_loss": True, "kl_estimator": "k3", "kl_clip": bound}
    if file.says(other) and file[other]:
        yield f"{other} is not {file.method}'s, which has {weight}, as in PaddleNLP"
    _copy(file, options, entropy_coeff="entropy_loss_coef")
    both = file["clip_range_ratio"]
    ends = [f"clip_range_ratio_{end}" for end in ("low", "high")]
    low, high = (file[end] if file.says(end) else both for end in ends)
    options |= {"eps_clip": low} if low == high else {"eps_clip_low_high": (low, high)}
    if file["enable_overlong_reward_buffer"]:
        options["overlong_buffer_len"] = file["overlong_reward_buffer"]
        options["overlong_penalty_factor"] = file["overlong_penalty_factor"]
    asked = [name for name in ("normalize_reward", "normalize_advantage") if file[name]]
    if grouped and asked:
        yield f"{', '.join(asked)} is off in grpo, as in PaddleNLP"
    elif file["normalize_reward"]:
        options["running_reward_norm"] = True
    if file.method == "ppo" and not file["normalize_advantage"]:
        yield "normalize_advantage false: ppo's advantages are whitened over the iteration all the same"


def _memory(file: PaddleFile, options: Chosen) -> Iterable[str]:
    if file["fp16"]:
        file.refuse("fp16", "use bf16, which needs no loss scaling")
    level = file["fp16_opt_level"]
    if level not in ("O0", "O1", "O2"):
        file.refuse("fp16_opt_level", "it must be O0, O1 or O2")
    if level == "O2" and not file["bf16"]:
        file.refuse("fp16_opt_level", "O2 needs bf16: true; for fp32 leave it out")
    if level == "O0":
        options["bf16"] = False
    if file["recompute"]:
        kept = _KEPT.get(file["recompute_granularity"])
        if kept is None:
            file.refuse("recompute_granularity", f"it must be one of {', '.join(_KEPT)}")
        options |= {"gradient_checkpointing": True, "gradient_checkpointing_keep": kept}
    levels = file["offload_level"] or []
    if unknown := [level for level in levels if level not in _OFFLOADED]:
        file.refuse("offload_level", f"{unknown[0]} is none of {', '.join(_OFFLOADED)}")
    frozen = options["init_kl_coef"] or "reward_pretrain" in options
    if "freeze_model" in levels and frozen:
        options["ref_reward_offload"] = True
    if "optimizer" in levels or "train_model" in levels:
        options["deepspeed_enable_sleep"] = True
    return ()


def _copy(file: PaddleFile, options: Chosen, **names: str) -> None:
    """Chosen that are set only where the file has the key."""
    options |= {ours: file[theirs] for theirs, ours in names.items() if file.says(theirs)}
