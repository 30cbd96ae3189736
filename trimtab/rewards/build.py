"""The reward of a run, from its options: models, functions, servers and verifiers, added up with their weights."""

import hashlib
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from trimtab.config.agents import EnvironmentOptions
from trimtab.config.jobs import GenerateOptions
from trimtab.config.rewards import GIVEN
from trimtab.config.rl_jobs import RLOptions, TailOptions
from trimtab.config.serving import StepScoreOptions
from trimtab.config.sources import listed
from trimtab.distributed.device import Device
from trimtab.distributed.mesh import Mesh
from trimtab.models.fingerprint import weights_fingerprint
from trimtab.models.sharded import frozen_is_split, share_rows
from trimtab.processes.waiting import Waiting
from trimtab.rewards.classifiers import load_judge
from trimtab.rewards.client import HttpReward
from trimtab.rewards.environment import EnvironmentReward
from trimtab.rewards.functions import CALLS_AT_ONCE, FunctionReward
from trimtab.rewards.given import GivenReward
from trimtab.rewards.model import ModelReward
from trimtab.rewards.process import ProcessReward
from trimtab.rewards.types import Reward
from trimtab.rewards.verify import make_verifier
from trimtab.rewards.weighing import Weighted

Parts = list[tuple[Reward, float]]  # rewards and their weights


def build_reward(
    options: RLOptions | GenerateOptions,
    device: Device,
    tokenizer: PreTrainedTokenizerBase,
    stopped: Callable[[], bool] = lambda: False,
) -> Weighted:
    """All of it, in this process. `tokenizer`: the policy's; `stopped`: whether the run has been told to stop, which
    ends every wait (GivenUp)."""
    return Weighted([*reward_models(options, device, tokenizer), *other_rewards(options, stopped)])


def reward_models(
    options: RLOptions | GenerateOptions, device: Device, tokenizer: PreTrainedTokenizerBase, mesh: Mesh | None = None
) -> list[tuple[ModelReward | ProcessReward, float]]:
    """What needs a device: the models of --reward_pretrain. `mesh`: the processes that have them together."""
    kept: dict[str, Any] = {}
    if isinstance(options, RLOptions):
        offload = options.ref_reward_offload
        kept = {"offload": offload, "mesh": mesh if mesh and frozen_is_split(options, mesh, offload=offload) else None}
    models = [_model(name, options, device, tokenizer, **kept) for name in listed(options.reward_pretrain)]
    if mesh and isinstance(options, RLOptions):
        for model in models:
            share_rows(model.model, options, mesh, "--reward_pretrain")
    return list(zip(models, options.reward_weights or (1.0,) * len(models)))


def other_rewards(options: RLOptions | GenerateOptions, stopped: Callable[[], bool]) -> Parts:
    """What is best near the answers: functions, servers and verifiers."""
    waiting = Waiting(stopped)
    files, addresses = _places(options)
    by_groups = isinstance(options, RLOptions) and options.outlives_updates
    limits: dict[str, Any] = {} if options.reward_timeout is None else {"seconds": options.reward_timeout}
    limits |= {"calls_at_once": CALLS_AT_ONCE} if by_groups else {}
    places = [*listed(options.reward_func), *files]
    rewards: list[Reward] = [
        GivenReward(place) if place.startswith(GIVEN) else FunctionReward(place, waiting=waiting, **limits)
        for place in places
    ]
    if addresses:
        limits = {} if options.reward_timeout is None else {"timeout": options.reward_timeout}
        limits |= {"concurrency": CALLS_AT_ONCE * len(addresses)} if by_groups else {}
        rewards.append(HttpReward(addresses, waiting=waiting, **limits))
    models = len(listed(options.reward_pretrain))
    weights = options.reward_weights[models:] if options.reward_weights else (1.0,) * len(rewards)
    parts: Parts = list(zip(rewards, weights, strict=True))
    if options.reward_verifier:
        parts += make_verifier(options.reward_verifier, waiting).parts
    if isinstance(options, EnvironmentOptions) and (source := options.environment_source):
        parts.append((EnvironmentReward(source), 1.0))
    return parts


def in_words(rewards: str, options: RLOptions) -> str:
    """Everything that rewards the answers of an RL run; `rewards`: what there is besides recordings and teachers."""
    if options.replay:
        told = [f"as recorded in {options.replay}", *([f"evaluations by {rewards}"] if rewards else [])]
    else:
        told = [rewards] if rewards else []
    if options.teacher_model:
        told.append(f"{options.teacher_coef:g} x log-probability by the teacher {options.teacher_model}")
    return "; ".join(told)


def contents(reward: Weighted) -> list[str | None]:
    """What each part's path leads to, which may change while the path does not; None: nothing that could be read."""
    return [_contents(part) for part, _ in reward.parts]


def _contents(reward: Reward) -> str | None:
    if isinstance(reward, ModelReward):
        return weights_fingerprint(reward.model)
    if isinstance(reward, GivenReward):
        return None if (text := reward.source()) is None else hashlib.blake2b(text, digest_size=16).hexdigest()
    if isinstance(reward, FunctionReward):
        return hashlib.blake2b(reward.file.read_bytes(), digest_size=16).hexdigest()
    return None


def _places(options: RLOptions | GenerateOptions) -> tuple[list[str], list[str]]:
    """Files of functions, and addresses of servers, which share one batch."""
    places = listed(options.remote_rm_url)
    files = [place for place in places if not place.startswith(("http://", "https://"))]
    return files, [place for place in places if place not in files]


def _model(
    name: str, options: RLOptions | GenerateOptions, device: Device, tokenizer: PreTrainedTokenizerBase, **kept: Any
) -> ModelReward | ProcessReward:
    if isinstance(options, GenerateOptions):
        passes: dict[str, Any] = {"max_samples": options.micro_batch_size}
        normalize = False  # what is compared within a prompt needs none
    else:
        count = options.micro_reward_batch_size or options.micro_rollout_batch_size
        passes = {"max_samples": None if options.use_dynamic_batch else count}
        normalize = options.normalize_reward
    if isinstance(options, StepScoreOptions) and options.placeholder_token:
        place, separator = options.step_reward, options.step_separator
        return ProcessReward(
            name, options, device, place=place, separator=separator, policy_tokenizer=tokenizer, **passes, **kept
        )
    settings = (
        kept
        | passes
        | {
            "policy_tokenizer": tokenizer,
            "messages_key": options.input_key if options.apply_chat_template else None,
            "normalize": normalize,
        }
    )
    if isinstance(options, TailOptions):
        return load_judge(name, options, device, **settings)
    return ModelReward(name, options, device, **settings)
