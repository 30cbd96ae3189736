"""In what the manifests of two runs differ: what makes them two trainings, and what may differ between devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from trimtab.config.agents import EnvironmentOptions
from trimtab.config.asynchronous import AsyncOptions
from trimtab.config.placement import COLOCATING, ROLES
from trimtab.config.rewards import RewardSourceOptions
from trimtab.config.rl import RecordingOptions
from trimtab.config.rl_jobs import OF_ALL_ANSWERS, OF_EVALUATION, OF_SAMPLING
from trimtab.errors import UserError
from trimtab.report.numbers import plain
from trimtab.report.read import MANIFEST, Run
from trimtab.report.settings import defaults_of

MUST_AGREE = {
    "initial_weights": "they begin with different weights",
    "trainable": "they train different parameters",
    "data_order": "they learn from different data, or from the same in another order",
    "seed": "they have different seeds",
    "steps": "they are planned for different numbers of steps, so their learning rates change differently",
}
MAY_DIFFER = {
    "dtype": "precision",
    "device": "device",
    "device_type": "kind of device",
    "threads": "threads",
    "processes": "processes",
    "zero_stage": "ZeRO stage",
    "layout": "layout of the processes",
    "attention_path": "attention",
    "fused_optimiser": "fused optimiser",
    "bf16_fault": "bf16",
}
WITH_A_FINGERPRINT = {"prompt_data", "prompt_data_probs", "prompt_split"}
"""Settings of RL whose effect the order of the data shows, wherever the data lie."""


def _names(*groups: type) -> set[str]:
    return {known.name for group in groups for known in fields(group)}


OF_THE_DEVICE = {
    *(f"{role}_num_{what}" for role in ROLES for what in ("nodes", "gpus_per_node")),
    *(*COLOCATING, "controller_apart", "ref_reward_offload", "deepspeed_enable_sleep", "actor_init_on_gpu"),
    *("vllm_num_engines", "vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "vllm_enable_sleep"),
    *("vllm_sync_backend", "vllm_sync_with_ray", "vllm_sync_lora", "enforce_eager", "enable_prefix_caching"),
    *("rollout_engine", "rollout_slots", "rollout_kv_tokens", "attn_implementation", "use_liger_kernel"),
    *("micro_rollout_batch_size", "micro_logprob_batch_size", "micro_reward_batch_size", "micro_value_batch_size"),
    *("rollout_max_tokens_per_gpu", "save_rollouts", "async_timeout", *OF_EVALUATION),
    *("env_timeout", "env_workers", "env_threads", "env_memory", "env_retries", "env_max_failed", "env_eval_rows"),
}
"""Settings that say where and how fast, and what is looked at on the way."""
OF_ANSWERS = _names(RewardSourceOptions, AsyncOptions, EnvironmentOptions) | {
    *(*OF_SAMPLING, *OF_ALL_ANSWERS, "dynamic_filtering_reward_range"),
}
"""Settings without effect on answers that are recorded, rewards and all."""
FILES = "files-"
"""What a fingerprint of weights begins with that was taken from files: it does not depend on the precision."""


@dataclass
class Differences:
    disagreements: list[str] = field(default_factory=list)
    """Why these are not the same training, each in a line."""
    allowed: list[str] = field(default_factory=list)
    """What may differ, and does."""


def differences(a: Run, b: Run, *, same_answers: bool) -> Differences:
    """`same_answers`: of RL, that both learn from what one of them recorded."""
    _check(a, b)
    found = Differences()
    for name, told in MUST_AGREE.items():
        if a.manifest.get(name) != b.manifest.get(name):
            shown = f" ({plain(a.manifest.get(name))} and {plain(b.manifest.get(name))})"
            found.disagreements.append(told + (shown if name in ("seed", "steps") else ""))
    if not same_answers and a.manifest.get("reward") != b.manifest.get("reward"):
        found.disagreements.append(
            f"their rewards are {plain(a.manifest.get('reward'))} and {plain(b.manifest.get('reward'))}"
        )
    for name, told in MAY_DIFFER.items():
        if a.manifest.get(name) != b.manifest.get(name):
            found.allowed.append(f"{told}: {_shown(a, name)} and {_shown(b, name)}")
    found.allowed += _versions(a, b)
    for name, told in _settings(a, b):
        free = name in OF_THE_DEVICE or (same_answers and name in OF_ANSWERS)
        (found.allowed if free else found.disagreements).append(told)
    return found


def _check(a: Run, b: Run) -> None:
    for run in (a, b):
        if not run.manifest.get("initial_weights"):
            raise UserError(f"{run.folder}: no readable {MANIFEST} there, which says what the run is made of")
        if unsaid := [name for name in MUST_AGREE if run.manifest.get(name) is None]:
            raise UserError(
                f"{run.folder}: its {MANIFEST} does not say {', '.join(unsaid)}, so whether both runs are the same "
                "training cannot be told; train it again with this version"
            )
    weights = {str(run.manifest["initial_weights"]) for run in (a, b)}
    kinds = {known.startswith(FILES) for known in weights}
    precisions = {run.manifest.get("dtype") for run in (a, b)}
    if len(kinds) > 1 or (len(weights) > 1 and kinds == {False} and len(precisions) > 1):
        raise UserError(
            "whether both runs begin with the same weights cannot be told: save the model as safetensors files, and "
            "train both from them"
        )


def _settings(a: Run, b: Run) -> Iterator[tuple[str, str]]:
    """Settings in which the runs differ, in words. One that only one run knows counts as its default in the other."""
    first, second = (dict(run.manifest.get("settings") or {}) for run in (a, b))
    missing = object()
    for name in dict.fromkeys([*first, *second]):
        if name in _names(RecordingOptions) | WITH_A_FINGERPRINT:
            continue
        x, y = (known.get(name, defaults_of(run.job).get(name, missing)) for run, known in ((a, first), (b, second)))
        if x != y:
            yield name, f"--{name} is {_value(x, missing)} and {_value(y, missing)}"


def _versions(a: Run, b: Run) -> Iterator[str]:
    first, second = (dict(run.manifest.get("versions") or {}) for run in (a, b))
    for name in dict.fromkeys([*first, *second]):
        if first.get(name) != second.get(name):
            yield f"{name}: {first.get(name, 'not installed')} and {second.get(name, 'not installed')}"


def _shown(run: Run, name: str) -> str:
    return plain(run.manifest[name]) if name in run.manifest else "not said"


def _value(value: Any, missing: object) -> str:
    return "not an option" if value is missing else plain(value)
