"""PaddleNLP's file for GRPO, REINFORCE++ or PPO, read as options of `trimtab rl`.

The table of keys says what each becomes; names and defaults are those of PaddleNLP's llm/alignment/rl of mid-2025. The
rules below it are for keys that are read together. Once a file is PaddleNLP's, every key of it goes through the table
alone: names that both sides have need not mean the same. docs/paddlenlp.md shows the table.
"""

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NoReturn

from trimtab.config.option import find, plain
from trimtab.config.training_options import Origin
from trimtab.errors import UserError


@dataclass(frozen=True)
class Key:
    name: str
    kind: type
    """bool, int, float or str; list: words, separated by spaces or in a YAML list."""
    absent: Any
    """What PaddleNLP takes where a file does not have the key; None: nothing."""
    here: str
    """What it becomes, or why it becomes nothing."""
    option: str | None = None
    """The option of ours that means the same, value by value."""
    noted: bool = False
    """It has no meaning here, which is said when a file has it."""


def same(name: str, option: str, kind: type, absent: Any = None) -> Key:
    return Key(name, kind, absent, f"`--{option}`", option=option)


def noted(*names: str, why: str, kind: type = str) -> list[Key]:
    return [Key(name, kind, None, why, noted=True) for name in names]


KERNELS = "Paddle's kernels, for which PyTorch has its own"
CASTING = "nothing is cast on the way here; with `--bf16` weights are bf16, their masters and gradient sums fp32"

_SHARED = {"lr_scheduler_type": str, "weight_decay": float, "warmup_ratio": float, "recompute": bool}
_SHARED |= {"recompute_granularity": str}  # what the critic has in common with the policy

SECTIONS: dict[str, tuple[Key, ...]] = {
    "Method, models and rewards": (
        Key("rl_algorithm", str, "ppo", "`--advantage_estimator` group_norm (grpo), reinforce or gae (ppo)"),
        same("actor_model_name_or_path", "pretrain", str),
        Key("reward_model_name_or_path", str, None, "`--reward_pretrain`; needed where use_rm_server is false"),
        Key("critic_model_name_or_path", str, None, "`--critic_pretrain` (ppo)"),
        Key("use_rm_server", bool, False, "the reward comes from reward_server"),
        Key("reward_server", str, None, "`--remote_rm_url`, with PaddleNLP's protocol"),
        Key("use_rule_reward", bool, False, "true: name the rule yourself, as `--reward_verifier`"),
    ),
    "Logging": (
        Key("logging_dir", str, None, "the loggers' folder; unset: runs in output_dir"),
        Key("logging_steps", int, 1, "`--logging_steps`, in iterations"),
        same("output_dir", "save_path", str),
        Key("report_to", list, "visualdl", "`--use_visualdl`, `--use_tensorboard`, `--use_wandb`"),
        Key("wandb_http_proxy", str, None, "`--wandb_http_proxy`, where report_to has wandb"),
        Key("run_name", str, None, "`--wandb_run_name`, also in TensorBoard and VisualDL"),
        *noted("logging_strategy", why="logging_steps counts"),
        *noted("disable_tqdm", "skip_profile_timer", why="times and progress are always measured here", kind=bool),
    ),
    "Data": (
        same("train_datasets", "prompt_data", str),
        Key("eval_datasets", str, None, "`--eval_dataset`, where do_eval or evaluation_strategy asks for it"),
        same("prompt_key", "input_key", str, "src"),
        Key("response_key", str, "tgt", "`--label_key`, unless a reward model scores, which needs no label"),
        same("dataloader_drop_last", "drop_last", bool, False),
        Key("dataloader_shuffle", bool, True, "false: `--no_shuffle`"),
        Key("balance_batch", bool, False, "always: passes are dealt out by their tokens; advantages know whole groups"),
        Key("use_remove_padding", bool, False, "always: samples are packed"),
    ),
    "Parallel layout": (
        Key("tensor_parallel_degree", int, -1, "`--ds_tensor_parallel_size`"),
        Key("sequence_parallel", bool, False, "nothing: cut layers keep whole rows between them; only memory differs"),
        Key("sharding", list, None, "`--zero_stage` 1, 2, 3, empty 0; offload: `--adam_offload`"),
        Key("sharding_parallel_degree", int, -1, "`--shard_size`; -1: all processes; 1: `--zero_stage 0`"),
        *noted("sharding_parallel_config", why="gradients are always exchanged during the backward pass", kind=list),
        Key("pipeline_parallel_degree", int, 1, "above 1 is refused: use tensor_parallel_degree and sharding"),
        Key("virtual_pp_degree", int, 1, "above 1 is refused"),
        Key("rollout_tensor_parallel_degree", int, -1, "tensor_parallel_degree, or it is refused"),
        *noted("data_parallel_degree", why="it follows from the number of processes", kind=int),
    ),
    "Rollouts": (
        same("max_prompt_len", "prompt_max_len", int, 4096),
        same("max_dec_len", "generate_max_len", int, 512),
        same("min_dec_len", "generate_min_len", int, 1),
        same("top_p", "top_p", float, 1.0),
        same("temperature", "temperature", float, 1.0),
        same("repetition_penalty", "repetition_penalty", float, 1.0),
        same("rollout_max_num_seqs", "rollout_slots", int),
        Key("rollout_quant_type", str, None, "`--weight_only_int8`; other types are refused"),
        Key("quant_type", str, None, "rollout_quant_type, as older files call it"),
        Key("dynamic_sampling", bool, False, "`--dynamic_filtering --dynamic_filtering_rule differing`"),
        Key("global_gen_batch_size", int, -1, "`--vllm_generate_batch_size`, with dynamic_sampling"),
        Key("max_gen_batches", int, 2, "`--dynamic_filtering_batches`, with dynamic_sampling"),
    ),
    "Training": (
        Key("do_train", bool, True, "false is refused: this command trains"),
        same("seed", "seed", int, 42),
        same("global_batch_size", "rollout_batch_size", int, 8),
        Key("global_mini_batch_size", int, -1, "`--train_batch_size`, in answers: x rollout_n; -1: all"),
        same("rollout_n", "n_samples_per_prompt", int, 1),
        same("update_iters", "max_epochs", int, 1),
        Key("per_device_train_batch_size", int, 8, "`--micro_train_batch_size`; `--micro_rollout_batch_size` too"),
        same("per_device_logprob_batch_size", "micro_logprob_batch_size", int),
        Key("per_device_reward_batch_size", int, None, "`--micro_reward_batch_size`, of a reward model"),
        Key("per_device_value_batch_size", int, None, "`--micro_value_batch_size` (ppo)"),
        *noted("per_device_rollout_batch_size", why="rollout_max_num_seqs are written at once", kind=int),
        *noted("gradient_accumulation_steps", why="it follows from the batch sizes, and is printed", kind=int),
        Key("num_train_epochs", float, 1.0, "`--num_episodes`, unless max_steps says how long"),
        Key("max_steps", int, -1, "`--max_steps`, in iterations, with as many episodes as it takes"),
        Key("max_length", int, None, "at least max_prompt_len + max_dec_len; no cut here"),
        same("learning_rate", "actor_learning_rate", float, 5e-5),
        Key("min_learning_rate", float, None, "cosine: `--min_lr_ratio`; linear: it is refused"),
        same("lr_scheduler_type", "lr_scheduler", str, "linear"),
        same("warmup_ratio", "lr_warmup_ratio", float, 0.0),
        Key("warmup_steps", int, 0, "`--lr_warmup_ratio`, as a share of max_steps"),
        Key("decay_steps", int, None, "max_steps, or it is refused"),
        same("weight_decay", "l2", float, 0.0),
        Key("adam_beta1", float, 0.9, "`--adam_betas`, the first"),
        Key("adam_beta2", float, 0.999, "`--adam_betas`, the second"),
        same("adam_epsilon", "adam_eps", float, 1e-8),
        same("max_grad_norm", "max_norm", float, 1.0),
        Key("critic_learning_rate", float, None, "`--critic_learning_rate` (ppo); unset: learning_rate"),
        Key("critic_min_learning_rate", float, None, "the policy's share of the peak, or it is refused (ppo)"),
        *(Key(f"critic_{name}", kind, None, f"{name}, or it is refused (ppo)") for name, kind in _SHARED.items()),
        Key("save_steps", int, 500, "`--save_steps`, in iterations"),
        Key("save_strategy", str, "steps", "no: `--save_steps -1`; epoch is refused: give save_steps"),
        same("save_total_limit", "max_ckpt_num", int, 1_000_000),
        *noted("unified_checkpoint", why="a checkpoint made here loads in any layout", kind=bool),
        *noted("overwrite_output_dir", why="a finished run there is set aside; `--overwrite` replaces it", kind=bool),
        *noted("resume_from_checkpoint", why="`--load_checkpoint` on the command line goes on from a checkpoint"),
        Key("ignore_save_lr_and_optim", bool, False, "weights alone: `--disable_ds_ckpt --save_hf_ckpt`"),
    ),
    "Objective": (
        Key("kl_coeff", float, 0.02, "`--init_kl_coef`, a k1 in the reward (ppo, reinforce_plus_plus)"),
        Key("kl_loss_coeff", float, 0.001, "`--init_kl_coef --use_kl_loss --kl_estimator k3` (grpo)"),
        same("pg_loss_coeff", "policy_loss_coef", float, 1.0),
        *noted("ptx_coeff", why="give `--pretrain_data` and `--ptx_coef` on the command line", kind=float),
        same("entropy_coeff", "entropy_loss_coef", float),
        Key("clip_range_ratio", float, 0.2, "`--eps_clip`"),
        Key("clip_range_ratio_low", float, None, "`--eps_clip_low_high`, the first; unset: clip_range_ratio"),
        Key("clip_range_ratio_high", float, None, "`--eps_clip_low_high`, the second; unset: clip_range_ratio"),
        Key("clip_range_score", float, 10.0, "`--reward_clip_range` to both sides; in grpo `--kl_clip` alone"),
        Key("clip_range_value", float, 5.0, "`--value_clip`, around the old value (ppo)"),
        Key("enable_overlong_reward_buffer", bool, False, "the two below are used"),
        Key("overlong_reward_buffer", int, 256, "`--overlong_buffer_len`"),
        Key("overlong_penalty_factor", float, 1.0, "`--overlong_penalty_factor`"),
        Key("normalize_reward", bool, False, "`--running_reward_norm`; off in grpo"),
        Key("normalize_advantage", bool, False, "always in ppo and reinforce_plus_plus; off in grpo"),
        Key("use_fp32_compute", bool, False, "always: log-probs, rewards, advantages and loss are fp32"),
    ),
    "Evaluation": (
        Key("do_eval", bool, False, "greedy, once: `--eval_temperature 0 --eval_n_samples_per_prompt 1`"),
        Key("evaluation_strategy", str, "no", "steps; epoch, no: `--eval_steps -1`, at start and end"),
        Key("eval_steps", int, None, "`--eval_steps`, in iterations; unset: logging_steps"),
        *noted("per_device_eval_batch_size", why="rollout_max_num_seqs are written at once, here too", kind=int),
    ),
    "Memory and precision": (
        Key("use_flash_attention", bool, False, "always: the best exact attention of the device"),
        Key("recompute", bool, False, "`--gradient_checkpointing`"),
        Key("recompute_granularity", str, "full", "full; others: `--gradient_checkpointing_keep products`"),
        *noted("recompute_use_reentrant", why="both forms compute the same", kind=bool),
        same("bf16", "bf16", bool, False),
        Key("fp16", bool, False, "true is refused: use bf16"),
        Key("fp16_opt_level", str, "O1", "with bf16 O1, O2: `--bf16`, O0: fp32; O2 alone is refused"),
        *noted("amp_master_grad", why=CASTING, kind=bool),
        *noted("amp_custom_black_list", "amp_custom_white_list", why=CASTING, kind=list),
        *noted("use_fused_rms_norm", "use_fused_rope", "use_fused_head_and_loss_fn", why=KERNELS, kind=bool),
        *noted("use_fused_linear", "fused_linear", why=KERNELS, kind=bool),
        Key("offload_level", list, None, "freeze_model: `--ref_reward_offload`; others: `--deepspeed_enable_sleep`"),
        Key("offload_optim", bool, False, "`--adam_offload`"),
        *noted("release_grads", why="gradients are always given back after a step", kind=bool),
        *noted("FLAGS_*", why=KERNELS),
    ),
}

KEYS = {key.name: key for keys in SECTIONS.values() for key in keys}


def found(name: str) -> Key | None:
    """The entry of a key as a file has it. Paddle's switches begin with FLAGS_."""
    return KEYS["FLAGS_*"] if name.startswith("FLAGS_") else KEYS.get(name)


def options_named(key: Key) -> list[str]:
    """The options of ours that a key may set."""
    return re.findall(r"--(\w+)", key.here)


def table() -> str:
    """What docs/paddlenlp.md has of this."""
    lines = []
    for section, keys in SECTIONS.items():
        rows: dict[tuple[str, str], list[str]] = {}
        for key in keys:
            absent = "" if key.absent is None else f"`{_shown(key.absent)}`"
            rows.setdefault((absent, f"{'*noted*: ' if key.noted else ''}{key.here}"), []).append(f"`{key.name}`")
        lines += [f"### {section}", "", "| key | absent | here |", "|---|---|---|"]
        lines += [f"| {', '.join(names)} | {absent} | {here} |" for (absent, here), names in rows.items()]
        lines.append("")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else str(value).lower() if isinstance(value, bool) else str(value)


# ---- a file, key by key


Entry = tuple[int, str, Any]  # line, key, value


class PaddleFile:
    """The values of a file by key, with PaddleNLP's own where it has none; a mistake names file and line."""

    def __init__(self, job_class: type, path: str, entries: Sequence[Entry], on_the_line: Mapping[str, Any]):
        self.path, self.on_the_line = path, on_the_line  # options of the command line, which wins
        self.lines: dict[str, int] = {}
        self.notes: list[str] = []  # what there is to say about how the file was read
        self.note = self.notes.append
        self._values: dict[str, Any] = {}
        for line, name, value in entries:
            where = f"{path} line {line}"
            key = found(name)
            if key is None:
                raise UserError(f"{where}: {_unknown(job_class, name)}")
            if name in self.lines:
                raise UserError(f"{where}: {name} is set twice in this file")
            self.lines[name] = line
            try:
                self._values[name] = _converted(key, value)
            except ValueError as error:
                raise UserError(f"{where}: {name} {error}") from None

    def __getitem__(self, name: str) -> Any:
        value = self._values.get(name)
        return _converted(KEYS[name], KEYS[name].absent) if value is None else value

    def says(self, name: str) -> bool:
        return self._values.get(name) is not None

    def now(self, name: str) -> Any:
        """The value after the command line, which wins."""
        return self.on_the_line.get(KEYS[name].option or "", self[name])

    def refuse(self, name: str, why: str) -> NoReturn:
        where = f"{self.path} line {self.lines[name]}" if name in self.lines else self.path
        raise UserError(f"{where}: {name} {'is missing' if self[name] is None else _shown(self[name])}: {why}")

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where options come from that the command line does not have."""
        return tuple(
            (option, key.name, self.lines.get(key.name))
            for key in KEYS.values()
            for option in options_named(key)
            if option not in self.on_the_line
        )

    @property
    def method(self) -> str:
        return self["rl_algorithm"]

    @property
    def updates(self) -> int:
        """Optimiser steps that PaddleNLP makes of a rollout; what the command line has is not yet checked."""
        return max(1, math.ceil(self.now("global_batch_size") / self.prompts_at_once) * self.now("update_iters"))

    @property
    def prompts_at_once(self) -> int:
        mini = self["global_mini_batch_size"]
        return mini if mini > 0 else max(1, self.now("global_batch_size"))

    def iterations(self, name: str) -> int:
        """This number of PaddleNLP's steps, in rollouts."""
        return math.ceil(self[name] / self.updates)


def _converted(key: Key, value: Any) -> Any:
    """A value of the key's type; None where it says nothing, as an empty text does."""
    if value is None or value == "":
        return None
    if key.kind is list:
        words = value.replace(",", " ").split() if isinstance(value, str) else value
        if not isinstance(words, list):
            raise ValueError(f"takes words, not {value!r}")
        return [str(word) for word in words]
    if key.kind is str and isinstance(value, bool):
        return "yes" if value else "no"  # YAML's own reading of a bare `no`
    return plain(key.kind, value)


def _unknown(job_class: type, name: str) -> str:
    close = difflib.get_close_matches(name, KEYS, n=1, cutoff=0.7) or [key for key in KEYS if name in key][:1]
    if close:
        return f"unknown key {name} of PaddleNLP; did you mean {close[0]}?"
    if option := find(job_class, name):
        return f"{name} is an option of ours in a file of PaddleNLP: put {option.flag} on the command line"
    return f"unknown key {name} of PaddleNLP; docs/paddlenlp.md lists them"


# ---- the options it asks for


_MARKS = {"rl_algorithm", "actor_model_name_or_path", "use_rm_server", "train_datasets"}
"""Keys that no file of ours has: one of them makes a file PaddleNLP's."""
_ESTIMATORS = {"grpo": "group_norm", "reinforce_plus_plus": "reinforce", "ppo": "gae"}
_REWARDS = ("reward_pretrain", "reward_func", "remote_rm_url", "judge", "reward_verifier", "replay")
_STAGES = {"stage1": 1, "stage2": 2, "stage3": 3, "offload": 0}
_KEPT = {"full": "nothing", "full_attn": "products", "core_attn": "products"}
_COUNTS = (
    *("global_batch_size", "rollout_n", "update_iters", "logging_steps", "save_steps", "eval_steps"),
    *(f"per_device_{what}_batch_size" for what in ("train", "logprob", "reward", "value")),
)
_LOGGERS = ("visualdl", "tensorboard", "wandb")
_NO_PIPELINES = "there are no pipelines here; use tensor_parallel_degree and sharding"
_ALLOWED: dict[str, tuple[Collection[Any], str]] = {
    "rl_algorithm": (_ESTIMATORS, f"it must be one of {', '.join(_ESTIMATORS)}"),
    "do_train": ((True,), "this command trains; leave it out"),
    "report_to": (("all", "none", *_LOGGERS), ""),
    "pipeline_parallel_degree": (range(-1, 2), _NO_PIPELINES),
    "virtual_pp_degree": (range(-1, 2), _NO_PIPELINES),
    "sharding": (_STAGES, ""),
    "rollout_quant_type": (("weight_only_int8",), "it must be weight_only_int8 or empty"),
    "quant_type": (("weight_only_int8",), "it must be weight_only_int8 or empty"),
    "save_strategy": (("steps", "no"), "give steps and save_steps, or no"),
    "evaluation_strategy": (("steps", "epoch", "no"), "it must be steps, epoch or no"),
    "fp16": ((False,), "use bf16, which needs no loss scaling"),
    "fp16_opt_level": (("O0", "O1", "O2"), "it must be O0, O1 or O2"),
    "offload_level": (("freeze_model", "train_model", "optimizer"), ""),
}
"""The values, or the words of a list, that a key may have, and what is said of others."""
_ALWAYS = ("balance_batch", "use_remove_padding", "use_flash_attention", "use_fp32_compute")

Chosen = dict[str, Any]


def is_paddle(entries: Sequence[Entry]) -> bool:
    """Whether a file is one of PaddleNLP's."""
    return any(name in _MARKS for _, name, _ in entries)


def in_our_words(
    job_class: type, path: str, entries: Sequence[Entry], on_the_line: Mapping[str, Any]
) -> tuple[Chosen, list[str], tuple[Origin, ...]]:
    """The options that a file asks for, what there is to say about it, and where each option comes from."""
    file = PaddleFile(job_class, path, entries, on_the_line)
    options = {key.option: file[key.name] for key in KEYS.values() if key.option and file[key.name] is not None}
    _note_without_meaning(file)
    _refuse_values(file)
    for rule in (_method, _rewards, _loggers, _data, _layout, _sampling, _steps, _optimiser, _objective, _memory):
        rule(file, options)
    return options, file.notes, file.origins


def _note_without_meaning(file: PaddleFile) -> None:
    """A line for each reason, with the keys that have no meaning for it."""
    reasons: dict[str, list[str]] = {}
    for name in file.lines:
        key = found(name)
        if key is not None and key.noted:
            reasons.setdefault(key.here, []).append(name)
    for why, names in reasons.items():
        file.note(f"{', '.join(names)}: {why.replace('`', '')}")
    if off := [name for name in _ALWAYS if file.says(name) and not file[name]]:
        file.note(f"{', '.join(off)} false: always done here")


def _refuse_values(file: PaddleFile) -> None:
    for name in _COUNTS:
        if file[name] is not None and file[name] < 1:
            file.refuse(name, "it must be at least 1")
    for name, (allowed, why) in _ALLOWED.items():
        value = file[name]
        for one in value if isinstance(value, list) else [value] if value is not None else []:
            if one not in allowed:
                file.refuse(name, why or f"{one} is none of {', '.join(allowed)}")


# ---- keys that are read together: each rule adds to the options and to the file's notes


def _method(file: PaddleFile, options: Chosen) -> None:
    if not file.says("rl_algorithm"):
        file.note(f"rl_algorithm is not in the file: {file.method}, as in PaddleNLP")
    options["advantage_estimator"] = _ESTIMATORS[file.method]
    if file.method != "ppo":
        critics = [name for name in file.lines if name.startswith("critic_") and file.says(name)]
        if critics:
            file.note(f"{', '.join(critics)}: {file.method} has no critic")
        return
    file.note("ppo's lambda is that of --lambd, 1 if it is not given: no key says it")
    options["critic_learning_rate"] = file["critic_learning_rate"] or file["learning_rate"]
    _copy(file, options, critic_model_name_or_path="critic_pretrain")
    _copy(file, options, per_device_value_batch_size="micro_value_batch_size")
    options["value_clip"] = file["clip_range_value"]
    for name in _SHARED:
        if file.says(f"critic_{name}") and file[f"critic_{name}"] != file[name]:
            file.refuse(f"critic_{name}", f"the critic shares the policy's {name}, which is {file[name]}")


def _rewards(file: PaddleFile, options: Chosen) -> None:
    model, server = file["reward_model_name_or_path"], file["reward_server"]
    if instead := [name for name in _REWARDS if name in file.on_the_line]:
        if server and instead != ["remote_rm_url"]:
            file.note(f"reward_server {server} is not asked: --{instead[0]} of the command line takes its place")
    elif file["use_rm_server"]:
        if server is None:
            file.refuse("reward_server", "use_rm_server is true; give its address, such as http://127.0.0.1:8731")
        options["remote_rm_url"] = server
        if model:
            file.note(f"reward_model_name_or_path {model} is not used: use_rm_server is true")
    elif model:
        options["reward_pretrain"] = model
        _copy(file, options, per_device_reward_batch_size="micro_reward_batch_size")
    elif file["use_rule_reward"]:
        file.refuse("use_rule_reward", "name the rule on the command line, for example --reward_verifier gsm8k:1.0")
    else:
        file.refuse("reward_model_name_or_path", "use_rm_server is false, so a reward model is needed")


def _loggers(file: PaddleFile, options: Chosen) -> None:
    named = file["report_to"]
    wanted = [name for name in _LOGGERS if name in named or "all" in named]
    if "all" in named or not file.says("report_to"):
        # Nobody has named these: what is not installed is not missed.
        absent = [name for name in wanted if find_spec(name) is None]
        wanted = [name for name in wanted if name not in absent]
        if absent:
            file.note(f"report_to {' '.join(named)}: {', '.join(absent)} is not installed; metrics.jsonl has all")
    folder = file["logging_dir"] or f"{file['output_dir'] or '.'}/runs"
    options |= {f"use_{name}": folder for name in wanted if name != "wandb"}
    if "wandb" in wanted:
        options["use_wandb"] = "True"
        _copy(file, options, wandb_http_proxy="wandb_http_proxy")
    if wanted:
        _copy(file, options, run_name="wandb_run_name")


def _data(file: PaddleFile, options: Chosen) -> None:
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
        file.note(f"max_length {longest} is max_prompt_len + max_dec_len, PaddleNLP asks for more: nothing is cut here")


def _layout(file: PaddleFile, options: Chosen) -> None:
    tensor = max(1, file["tensor_parallel_degree"])
    options["ds_tensor_parallel_size"] = tensor
    if file["rollout_tensor_parallel_degree"] not in (-1, tensor):
        file.refuse("rollout_tensor_parallel_degree", f"the trained weights sample, in {tensor} parts")
    if file["sequence_parallel"] and tensor > 1:
        file.note("sequence_parallel: layers that are cut keep whole rows between them; only memory differs")
    words, degree = file["sharding"] or [], file["sharding_parallel_degree"]
    stage = max((_STAGES[word] for word in words), default=0)
    options["zero_stage"] = 0 if degree == 1 else stage
    if options["zero_stage"] and degree > 1:
        options["shard_size"] = degree
    if "offload" in words or file["offload_optim"]:
        options["adam_offload"] = True


def _sampling(file: PaddleFile, options: Chosen) -> None:
    if file["rollout_quant_type"] or file["quant_type"]:
        options["weight_only_int8"] = True
    if not file["dynamic_sampling"]:
        return
    options |= {"dynamic_filtering": True, "dynamic_filtering_rule": "differing"}
    if file["global_gen_batch_size"] > 0:
        options["vllm_generate_batch_size"] = file["global_gen_batch_size"]
    if file["max_gen_batches"] > 0:
        options["dynamic_filtering_batches"] = file["max_gen_batches"]


def _steps(file: PaddleFile, options: Chosen) -> None:
    """Batches, and what is counted in steps: PaddleNLP's are optimiser steps, ours rollouts with all their updates."""
    micro = file["per_device_train_batch_size"]
    options |= {"micro_train_batch_size": micro, "micro_rollout_batch_size": micro}
    options["train_batch_size"] = file.prompts_at_once * file.now("rollout_n")
    options["logging_steps"] = file.iterations("logging_steps")
    counted = ["logging_steps"]
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
            file.note(f"max_steps {file['max_steps']} says how long, and not num_train_epochs, as in PaddleNLP")
    elif file["num_train_epochs"] < 1 or file["num_train_epochs"] % 1:
        file.refuse("num_train_epochs", "give a whole number of at least 1, or max_steps")
    else:
        options["num_episodes"] = int(file["num_train_epochs"])
    strategy, evaluated = file["evaluation_strategy"], file.on_the_line.get("eval_dataset", file["eval_datasets"])
    wanted = file["do_eval"] or strategy != "no"
    if wanted and not evaluated:
        file.note("nothing is evaluated: there are no eval_datasets")
    elif wanted:
        options |= {"eval_dataset": evaluated, "eval_temperature": 0.0, "eval_n_samples_per_prompt": 1}
        if strategy == "steps":
            name = "eval_steps" if file.says("eval_steps") else "logging_steps"
            options["eval_steps"] = file.iterations(name)
            counted.append(name)
    if file.updates > 1:
        said = ", ".join(f"{name} {file[name]}" for name in dict.fromkeys(counted))
        made = ", ".join(str(file.iterations(name)) for name in dict.fromkeys(counted))
        file.note(f"PaddleNLP counts each of {file.updates} updates as a step: {said} are {made} iterations")


def _optimiser(file: PaddleFile, options: Chosen) -> None:
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


def _objective(file: PaddleFile, options: Chosen) -> None:
    grouped, bound = file.method == "grpo", file["clip_range_score"]
    if bound <= 0:
        file.refuse("clip_range_score", "it must be above 0")
    weight, other = ("kl_loss_coeff", "kl_coeff") if grouped else ("kl_coeff", "kl_loss_coeff")
    options["init_kl_coef"] = file[weight]
    options["reward_clip_range"] = (-1e9, 1e9) if grouped else (-bound, bound)
    if grouped and file[weight]:
        options |= {"use_kl_loss": True, "kl_estimator": "k3", "kl_clip": bound}
    if file.says(other) and file[other]:
        file.note(f"{other} is not {file.method}'s, which has {weight}, as in PaddleNLP")
    ends = (f"clip_range_ratio_{end}" for end in ("low", "high"))
    low, high = (file[end] if file.says(end) else file["clip_range_ratio"] for end in ends)
    options |= {"eps_clip": low} if low == high else {"eps_clip_low_high": (low, high)}
    if file["enable_overlong_reward_buffer"]:
        options["overlong_buffer_len"] = file["overlong_reward_buffer"]
        options["overlong_penalty_factor"] = file["overlong_penalty_factor"]
    asked = [name for name in ("normalize_reward", "normalize_advantage") if file[name]]
    if grouped and asked:
        file.note(f"{', '.join(asked)} is off in grpo, as in PaddleNLP")
    elif file["normalize_reward"]:
        options["running_reward_norm"] = True
    if file.method == "ppo" and not file["normalize_advantage"]:
        file.note("normalize_advantage false: ppo's advantages are whitened over the iteration all the same")


def _memory(file: PaddleFile, options: Chosen) -> None:
    level = file["fp16_opt_level"]
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
    if "freeze_model" in levels and (options["init_kl_coef"] or "reward_pretrain" in options):
        options["ref_reward_offload"] = True
    if "optimizer" in levels or "train_model" in levels:
        options["deepspeed_enable_sleep"] = True


def _copy(file: PaddleFile, options: Chosen, **names: str) -> None:
    """Set options only where the file has the key."""
    options |= {ours: file[theirs] for theirs, ours in names.items() if file.says(theirs)}
