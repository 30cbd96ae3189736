"""The roles of an RL run, built where they work: functions of the options and a place.

actor       the policy that learns; the engine that answers from its weights, with the rewards that are best near
            it, unless engines are apart; with LoRA also the reference, the policy without its adapters
rollouts    where they are apart: an engine with weights of its own, and those rewards
reference   the policy as it was          teacher   a model that judges the policy's tokens
critic      what estimates returns        reward    the reward models
"""

import copy
import dataclasses
from typing import Any

from torch import nn

from trimtab.config.jobs import RLOptions
from trimtab.distributed.fsdp import GRADIENT_DTYPES
from trimtab.distributed.launcher import Place
from trimtab.models.load import Loaded, load_policy, load_reward_model
from trimtab.models.policy import Policy
from trimtab.models.reward import Critic
from trimtab.rewards.build import Parts, non_model_rewards, reward_models
from trimtab.rollout.engine import Engine
from trimtab.rollout.factory import build_engine, build_vllm_engine
from trimtab.train.launch import load_job_tokenizer
from trimtab.train.optimiser import Optimiser
from trimtab.train.reference import Reference
from trimtab.train.rl.checks import critic_start, first_reward
from trimtab.train.rl.playing import player_of
from trimtab.train.rl.rewarding import RewardModels
from trimtab.train.rl.rollouts import Rollouts
from trimtab.train.rl.sending import Sending, handover_of
from trimtab.train.rl.trainer import CriticTrainer, PolicyTrainer, ReferenceRole


def build_actor(options: RLOptions, place: Place) -> dict[str, Any]:
    tokenizer = load_job_tokenizer(options)
    loaded = load_policy(options, place.device, place.mesh)
    roles: dict[str, Any] = {"actor": actor_of(options, loaded, tokenizer, place)}
    if not options.engines_apart:
        # Those of a tensor group write the same answers, which are judged once.
        rewards = non_model_rewards(options, place.stop.requested) if place.mesh.tensor.leads else []
        roles["rollouts"] = rollouts_of(options, loaded.model, rewards, tokenizer, place)
    if has_reference(options) and options.lora_rank > 0:
        roles["reference"] = scorer(options, place, loaded)
    return roles


def build_engine_rollouts(options: RLOptions, place: Place) -> dict[str, Any]:
    """An engine apart from the policy: it begins with the weights that the policy begins with, and is sent others."""
    tokenizer = load_job_tokenizer(options)
    engine = build_vllm_engine(options.pretrain, tokenizer, **engine_settings(options, place))
    stopped = place.stop.requested
    rewards, player = non_model_rewards(options, stopped), player_of(options, engine, tokenizer, stopped)
    return {"rollouts": Rollouts(engine, rewards, tokenizer, stopped, player=player, beside=True)}


def build_reference(options: RLOptions, place: Place) -> dict[str, Any]:
    return {"reference": scorer(options, place)}


def build_teacher(options: RLOptions, place: Place) -> dict[str, Any]:
    return {"teacher": scorer(options, place, pretrain=options.teacher_model)}


def build_critic(options: RLOptions, place: Place) -> dict[str, Any]:
    tokenizer = load_job_tokenizer(options)
    name, _ = critic_start(options, tokenizer)
    tokenizer = copy.deepcopy(tokenizer)  # a classifier may need another padding token
    its_options = dataclasses.replace(options, pretrain=name)
    loaded = load_reward_model(its_options, place.device, tokenizer, place.mesh, root=Critic)
    if options.normalize_reward and name == first_reward(options):
        loaded.model.mean, loaded.model.deviation = loaded.model.config.mean, loaded.model.config.std
    optimiser = optimiser_of(options, loaded.model.model, options.critic_learning_rate, place)
    return {"critic": CriticTrainer(options, loaded.model, optimiser, tokenizer, place.device, place.mesh)}


def build_reward_models(options: RLOptions, place: Place) -> dict[str, Any]:
    models = reward_models(options, place.device, load_job_tokenizer(options), place.mesh)
    return {"reward": RewardModels(models, options, place.mesh)}


# ---- what they are made of


def has_reference(options: RLOptions) -> bool:
    return options.init_kl_coef > 0


def actor_of(
    options: RLOptions, loaded: Loaded, tokenizer: Any, place: Place, kind: type[PolicyTrainer] = PolicyTrainer
) -> PolicyTrainer:
    optimiser = optimiser_of(options, loaded.model.model, options.actor_learning_rate, place)
    actor = kind(options, loaded.model, optimiser, tokenizer, place.device, place.mesh)
    if options.engines_apart:
        actor.sending = Sending(handover_of(options, loaded.model), place.device)
    actor.origin = loaded
    return actor


def rollouts_of(options: RLOptions, policy: Policy, rewards: Parts, tokenizer: Any, place: Place) -> Rollouts:
    engine: Engine
    if options.uses_vllm:
        settings = engine_settings(options, place)
        engine = build_vllm_engine(options.pretrain, tokenizer, handover_of(options, policy), **settings)
    else:
        engine = build_engine(
            policy,
            tokenizer,
            max_num_seqs=options.rollout_slots,
            kv_tokens=options.rollout_kv_tokens,
            weight_only_int8=options.weight_only_int8,
            eager=options.enforce_eager,
            tensor=place.mesh.tensor,
        )
    stopped = place.stop.requested
    player = player_of(options, engine, tokenizer, stopped, place.mesh.tensor)
    return Rollouts(engine, rewards, tokenizer, stopped, place.mesh.tensor, player=player)


def engine_settings(options: RLOptions, place: Place) -> dict[str, Any]:
    """Of a vLLM engine."""
    return {
        "bf16": options.bf16,
        "longest": options.longest_rollout,
        "max_num_seqs": options.rollout_slots,
        "memory_share": options.vllm_gpu_memory_utilization,
        "prefix_caching": options.enable_prefix_caching,
        # Without an accelerator there are no graphs, and to compile takes a minute.
        "eager": options.enforce_eager or not place.device.is_accelerator,
        "tensor_parallel": options.vllm_tensor_parallel_size,
        "sleeps": options.vllm_enable_sleep,
        "adapter_rank": options.lora_rank if options.vllm_sync_lora == "adapter" else 0,
        "seed": options.seed,
        "trust_remote_code": options.trust_remote_code,
    }


def scorer(
    options: RLOptions, place: Place, policy: Loaded | None = None, pretrain: str | None = None
) -> ReferenceRole:
    """A frozen model that scores the policy's tokens: what the policy was at the start, unless another is named."""
    offload = options.ref_reward_offload
    reference = Reference(options, policy, place.device, place.mesh, pretrain=pretrain, offload=offload)
    return ReferenceRole(reference, options, place.mesh, "reference" if pretrain is None else "teacher")


def optimiser_of(options: RLOptions, model: nn.Module, learning_rate: float, place: Place) -> Optimiser:
    """How many steps it will have, its learner is told later."""
    return Optimiser(
        model,
        options,
        learning_rate=learning_rate,
        fused=place.device.fused_adam(),
        gradient_dtype=GRADIENT_DTYPES[options.grad_accum_dtype],
        offload=options.adam_offload,
    )
