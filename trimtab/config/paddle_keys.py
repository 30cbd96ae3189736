"""The keys of a PaddleNLP file for GRPO, REINFORCE++ or PPO, and what each is here. paddle_spelling.py does what this
table says; the table of docs/paddlenlp.md is made from it.

Names and defaults are those of PaddleNLP's llm/alignment/rl of mid-2025.
"""

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Any


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


def noted(name: str, why: str, kind: type = str) -> Key:
    return Key(name, kind, None, why, noted=True)


KERNELS = "Paddle's kernels, for which PyTorch has its own"
CASTING = "nothing is cast on the way here; with `--bf16` weights are bf16, their masters and gradient sums fp32"
SHOWN = "times and progress are always measured here"

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
        noted("logging_strategy", "logging_steps counts"),
        noted("disable_tqdm", SHOWN, bool),
        noted("skip_profile_timer", SHOWN, bool),
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
        noted("sharding_parallel_config", "gradients are always exchanged while the backward pass goes on", list),
        Key("pipeline_parallel_degree", int, 1, "above 1 is refused: use tensor_parallel_degree and sharding"),
        Key("virtual_pp_degree", int, 1, "above 1 is refused"),
        Key("rollout_tensor_parallel_degree", int, -1, "tensor_parallel_degree, or it is refused"),
        noted("data_parallel_degree", "it follows from the number of processes", int),
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
        noted("per_device_rollout_batch_size", "rollout_max_num_seqs are written at once", int),
        noted("gradient_accumulation_steps", "it follows from the batch sizes, and is printed", int),
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
        Key("critic_lr_scheduler_type", str, None, "lr_scheduler_type, or it is refused (ppo)"),
        Key("critic_weight_decay", float, None, "weight_decay, or it is refused (ppo)"),
        Key("critic_warmup_ratio", float, None, "warmup_ratio, or it is refused (ppo)"),
        Key("critic_recompute", bool, None, "recompute, or it is refused (ppo)"),
        Key("critic_recompute_granularity", str, None, "recompute_granularity, or it is refused (ppo)"),
        Key("save_steps", int, 500, "`--save_steps`, in iterations"),
        Key("save_strategy", str, "steps", "no: `--save_steps -1`; epoch is refused: give save_steps"),
        same("save_total_limit", "max_ckpt_num", int, 1_000_000),
        noted("unified_checkpoint", "a checkpoint made here loads in any layout", bool),
        noted("overwrite_output_dir", "a finished run in output_dir is set aside; `--overwrite` replaces it", bool),
        noted("resume_from_checkpoint", "`--load_checkpoint` on the command line goes on from a checkpoint"),
        Key("ignore_save_lr_and_optim", bool, False, "weights alone: `--disable_ds_ckpt --save_hf_ckpt`"),
    ),
    "Objective": (
        Key("kl_coeff", float, 0.02, "`--init_kl_coef`, a k1 in the reward (ppo, reinforce_plus_plus)"),
        Key("kl_loss_coeff", float, 0.001, "`--init_kl_coef --use_kl_loss --kl_estimator k3` (grpo)"),
        same("pg_loss_coeff", "policy_loss_coef", float, 1.0),
        noted("ptx_coeff", "the data for it come with `--pretrain_data` and `--ptx_coef` on the command line", float),
        Key("entropy_coeff", float, None, "`--entropy_loss_coef`; 0: measured, not trained"),
        Key("clip_range_ratio", float, 0.2, "`--eps_clip`"),
        Key("clip_range_ratio_low", float, None, "`--eps_clip_low_high`, the first; unset: clip_range_ratio"),
        Key("clip_range_ratio_high", float, None, "`--eps_clip_low_high`, the second; unset: clip_range_ratio"),
        Key(
            "clip_range_score",
            float,
            10.0,
            "`--reward_clip_range` to both sides; in grpo `--kl_clip`, and no reward clip",
        ),
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
        noted("per_device_eval_batch_size", "rollout_max_num_seqs are written at once, here too", int),
    ),
    "Memory and precision": (
        Key("use_flash_attention", bool, False, "always: the best exact attention of the device"),
        Key("recompute", bool, False, "`--gradient_checkpointing`"),
        Key("recompute_granularity", str, "full", "full; others: `--gradient_checkpointing_keep products`"),
        noted("recompute_use_reentrant", "both forms compute the same", bool),
        same("bf16", "bf16", bool, False),
        Key("fp16", bool, False, "true is refused: use bf16"),
        Key("fp16_opt_level", str, "O1", "with bf16 O1, O2: `--bf16`, O0: fp32; O2 alone is refused"),
        noted("amp_master_grad", CASTING, bool),
        noted("amp_custom_black_list", CASTING, list),
        noted("amp_custom_white_list", CASTING, list),
        noted("use_fused_rms_norm", KERNELS, bool),
        noted("use_fused_rope", KERNELS, bool),
        noted("use_fused_head_and_loss_fn", KERNELS, bool),
        noted("use_fused_linear", KERNELS, bool),
        noted("fused_linear", KERNELS, bool),
        Key("offload_level", list, None, "freeze_model: `--ref_reward_offload`; others: `--deepspeed_enable_sleep`"),
        Key("offload_optim", bool, False, "`--adam_offload`"),
        noted("release_grads", "gradients are always given back after a step", bool),
        noted("FLAGS_*", KERNELS),
    ),
}

KEYS = {key.name: key for keys in SECTIONS.values() for key in keys}
FLAGS = "FLAGS_"
"""How Paddle's own switches begin; most are set in the environment, where they do no harm either."""


def found(name: str) -> Key | None:
    """The entry of a key as a file has it."""
    return KEYS["FLAGS_*"] if name.startswith(FLAGS) else KEYS.get(name)


def options_named(key: Key) -> list[str]:
    """The options of ours that a key may set."""
    return re.findall(r"--(\w+)", key.here)


def told(name: str, known: Container[str]) -> str | None:
    """What a key is here, for who puts it on the command line of a job that has the options `known`."""
    key = KEYS.get(name)
    if key is None or "rollout_batch_size" not in known:
        return None
    here = key.here.replace("`", "")
    return f"PaddleNLP's {name} is {here}" if "--" in here else f"{name} is a key of PaddleNLP's file ({here})"


def table() -> str:
    """What docs/paddlenlp.md has of this."""
    lines = []
    for section, keys in SECTIONS.items():
        lines += [f"### {section}", "", "| key | absent | here |", "|---|---|---|"]
        for key in keys:
            absent = "" if key.absent is None else f"`{_shown(key.absent)}`"
            lines.append(f"| `{key.name}` | {absent} | {'*noted*: ' if key.noted else ''}{key.here} |")
        lines.append("")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
