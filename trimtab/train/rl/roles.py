"""The roles of an RL run: which exist, in which processes they are, and how they are built.

actor       the trained policy; the engine that samples from its weights, with the rewards near it, unless engines are
            in their own processes; with LoRA also the reference and a teacher that are the policy without its adapters
rollouts    with engines in their own processes: an engine with its own copy of the weights, and the rewards near it
reference   the initial policy            teacher   a model that scores the policy's tokens
critic      estimates returns             reward    the reward models

Modules of environments are imported only if the options name one.
"""

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from trimtab.config.data_options import listed
from trimtab.config.rl_jobs import RLOptions
from trimtab.data.prompts import PromptDataset, build_prompt_datasets, load_prompt_datasets
from trimtab.distributed.fsdp import GRADIENT_DTYPES
from trimtab.distributed.launcher import RoleContext, Unit
from trimtab.distributed.process_group import Peers
from trimtab.distributed.ray.placement import Layout
from trimtab.distributed.weight_transfer import TransferSender
from trimtab.errors import UserError
from trimtab.interrupts import StopRequest
from trimtab.models.load import Loaded, fake_policy, load_policy, load_reward_model
from trimtab.models.policy import Policy
from trimtab.models.reward import Critic
from trimtab.models.rotary import generated_context
from trimtab.models.routing import replay_routes_of_batches, routed_layers, routers_of
from trimtab.models.weight_export import WeightExport
from trimtab.plan.layouts import layout_of
from trimtab.rewards.build import Parts, non_model_rewards, reward_models
from trimtab.rollout.engine import Engine
from trimtab.rollout.factory import build_engine, build_vllm_engine, engine_environment
from trimtab.train.launch import load_job_tokenizer
from trimtab.train.layer_compilation import gave_up_line
from trimtab.train.optimizer import Optimizer
from trimtab.train.rl.async_worker import AsyncRolloutWorker, ThreadedRolloutWorker
from trimtab.train.rl.checks import critic_start, first_reward
from trimtab.train.rl.files import RunFiles
from trimtab.train.rl.rollout_worker import RolloutWorker
from trimtab.train.rl.state import Roles
from trimtab.train.rl.trainer import CriticTrainer, PolicyTrainer, ReferenceRole, RewardModels
from trimtab.train.task import FrozenScorer


def make_episode_engine(
    options: RLOptions,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    stopped: Callable[[], bool],
    tensor: Peers | None = None,
) -> Engine | None:
    """An episode engine that uses `engine`, if there is an environment.

    `tensor`: the tensor-parallel group, whose engines generate the same samples. `stopped`: ends the waits of a single
    process, unless episodes may span updates: then partial episodes are saved instead.
    """
    if not options.plays:
        return None
    from trimtab.envs.environment_engine import EnvironmentEngine
    from trimtab.envs.environment_pool import BroadcastPool
    from trimtab.server.environment_factory import episode_settings, make_environment_engine, never, open_pool

    settings = episode_settings(options, plain=not options.apply_chat_template)
    if tensor is None or tensor.size == 1:
        pool = open_pool(options, never if options.outlives_updates else stopped)
        return make_environment_engine(engine, pool, tokenizer, settings)
    shared = BroadcastPool(lambda: open_pool(options), tensor)
    try:
        if shared.info.kind == "agent":
            raise UserError(
                f"{options.environment_flag}: an agent asks for its turns itself, and not a policy cut over processes; "
                "use --zero_stage 3"
            )
        return EnvironmentEngine(engine, shared, tokenizer, settings)
    except BaseException:
        shared.close()
        raise


# ---- options, prompts and manifest of an environment


def with_environment_defaults(options: RLOptions) -> RLOptions:
    """The options with defaults that depend on model and tokenizer: episodes are as long as the context, and prompts
    use the chat template if there is one. Called in every process of a run before they communicate."""
    if not options.plays:
        return options
    changes: dict[str, Any] = {}
    if "apply_chat_template" not in options.given:
        tokenizer = load_job_tokenizer(options)
        changes["apply_chat_template"] = tokenizer.chat_template is not None and options.input_template is None
    if options.episode_max_len is None:
        changes["episode_max_len"] = generated_context(fake_policy(options).config)
        if changes["episode_max_len"] is None:
            raise UserError(
                f"--pretrain {options.pretrain} does not say how long its context is; give --episode_max_len"
            )
    return dataclasses.replace(options, **changes)


def with_routing_replay(options: RLOptions) -> RLOptions:
    """The options with --routing_replay on if auto means that, by engine and model. Called in every process of a run
    before they communicate. UserError: it is on, and the model's routing cannot be replayed."""
    asked = options.routing_replay
    yields = not options.uses_vllm or options.compile == "on" or options.exact == "on"
    if asked == "off" or (asked == "auto" and yields):
        return options
    policy = fake_policy(options)
    if routers_of(policy):
        given = options.given if asked == "on" else options.given - {"routing_replay"}  # "auto" demands nothing
        return dataclasses.replace(options, routing_replay="on", given=given)
    if asked == "auto":
        return options
    raise UserError(
        f"--routing_replay on: {type(policy.inner).__name__} has no mixture of experts whose routing can be replayed "
        "(a softmax over the experts of a layer, of which the likeliest are used); drop it"
    )


def load_stores(
    options: RLOptions, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, PromptDataset], dict[str, Any]]:
    """The prompts of training and, if there are any, of evaluation: from data, or the environment's own rows."""
    if options.prompt_data is not None:
        return load_prompt_datasets(options, tokenizer)
    from trimtab.server.environment_factory import environment_columns, environment_rows

    count, held_out = min(options.env_rows, options.max_samples), options.env_eval_rows
    rows = environment_rows(options, count, options.seed, eval_count=held_out, instead="--prompt_data")
    return build_prompt_datasets(rows, tokenizer, dataclasses.replace(options, **environment_columns(rows["train"])))


def contents_of_environment(options: RLOptions) -> dict[str, str]:
    """A hash of the environment's file for the manifest: it may change while its path does not."""
    if not options.agent_func_path:
        return {}
    file = Path(options.agent_func_path[: options.agent_func_path.rfind(".py") + 3]).expanduser()
    return {"environment": hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()}


# ---- how roles are built


def build_actor(options: RLOptions, place: RoleContext) -> dict[str, Any]:
    tokenizer = load_job_tokenizer(options)
    loaded = load_policy(options, place.device, place.mesh)
    roles: dict[str, Any] = {"actor": actor_of(options, loaded, tokenizer, place)}
    if not options.engines_apart:
        # The ranks of a tensor-parallel group generate the same samples, which their first rank scores.
        rewards = non_model_rewards(options, place.stop.requested) if place.mesh.tensor.is_rank_zero else []
        roles["rollouts"] = rollouts_of(options, loaded.model, rewards, tokenizer, place)
    if has_reference(options) and options.lora_rank > 0:
        roles["reference"] = scorer(options, place, loaded)
    if options.teacher_is_base:
        roles["teacher"] = scorer(options, place, loaded)
    return roles


def build_engine_rollouts(options: RLOptions, place: RoleContext) -> dict[str, Any]:
    """A rollout worker in its own process: its engine loads the initial weights, and receives new ones later."""
    tokenizer = load_job_tokenizer(options)
    engine = build_vllm_engine(options.pretrain, tokenizer, **engine_settings(options, place))
    stopped = place.stop.requested
    rewards, player = non_model_rewards(options, stopped), make_episode_engine(options, engine, tokenizer, stopped)
    kind = ThreadedRolloutWorker if options.outlives_updates else RolloutWorker
    return {"rollouts": kind(engine, rewards, tokenizer, stopped, player=player)}


def build_reference(options: RLOptions, place: RoleContext) -> dict[str, Any]:
    return {"reference": scorer(options, place)}


def build_teacher(options: RLOptions, place: RoleContext) -> dict[str, Any]:
    return {"teacher": scorer(options, place, pretrain=options.teacher_model)}


def build_critic(options: RLOptions, place: RoleContext) -> dict[str, Any]:
    tokenizer = load_job_tokenizer(options)
    name, _ = critic_start(options, tokenizer)
    tokenizer = copy.deepcopy(tokenizer)  # a classifier may need another padding token
    its_options = dataclasses.replace(options, pretrain=name)
    loaded = load_reward_model(its_options, place.device, tokenizer, place.mesh, root=Critic)
    if options.normalize_reward and name == first_reward(options):
        loaded.model.mean, loaded.model.deviation = loaded.model.config.mean, loaded.model.config.std
    optimizer = make_optimizer(options, loaded.model.model, options.critic_learning_rate, place)
    return {"critic": CriticTrainer(options, loaded.model, optimizer, tokenizer, place.device, place.mesh)}


def build_reward_models(options: RLOptions, place: RoleContext) -> dict[str, Any]:
    models = reward_models(options, place.device, load_job_tokenizer(options), place.mesh)
    return {"reward": RewardModels(models, options, place.mesh)}


# ---- parts of roles


def has_reference(options: RLOptions) -> bool:
    return options.init_kl_coef > 0


def actor_of(
    options: RLOptions, loaded: Loaded, tokenizer: Any, place: RoleContext, kind: type[PolicyTrainer] = PolicyTrainer
) -> PolicyTrainer:
    optimizer = make_optimizer(options, loaded.model.model, options.actor_learning_rate, place)
    actor = kind(options, loaded.model, optimizer, tokenizer, place.device, place.mesh)
    if options.routing_replay == "on":
        replay_routes_of_batches(loaded.model)
    if options.engines_apart:
        actor.export, actor.sender = weight_export(options, loaded.model), TransferSender(place.device.torch)
    actor.origin = loaded
    return actor


def weight_export(options: RLOptions, policy: Policy) -> WeightExport:
    return WeightExport(policy, bf16=options.bf16, adapters=options.vllm_sync_lora == "adapter")


def rollouts_of(
    options: RLOptions, policy: Policy, rewards: Parts, tokenizer: Any, place: RoleContext
) -> RolloutWorker:
    engine: Engine
    if options.uses_vllm:
        settings = engine_settings(options, place)
        engine = build_vllm_engine(options.pretrain, tokenizer, weight_export(options, policy), **settings)
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
    player = make_episode_engine(options, engine, tokenizer, stopped, place.mesh.tensor)
    kind = AsyncRolloutWorker if options.outlives_updates else RolloutWorker
    return kind(engine, rewards, tokenizer, stopped, place.mesh.tensor, player=player)


def engine_settings(options: RLOptions, place: RoleContext) -> dict[str, Any]:
    """Settings of a vLLM engine."""
    return {
        "bf16": options.bf16,
        "longest": options.longest_rollout,
        "max_num_seqs": options.rollout_slots,
        "memory_share": options.vllm_gpu_memory_utilization,
        "prefix_caching": options.enable_prefix_caching,
        # A CPU has no CUDA graphs, and compiling would take a minute.
        "eager": options.enforce_eager or not place.device.is_accelerator,
        "tensor_parallel": options.vllm_tensor_parallel_size,
        "sleeps": options.vllm_enable_sleep,
        "routed_layers": routed_layers(fake_policy(options)) if options.routing_replay == "on" else (),
        "needs_routes": options.asks("routing_replay"),
        "adapter_rank": options.lora_rank if options.vllm_sync_lora == "adapter" else 0,
        "seed": options.seed,
        "trust_remote_code": options.trust_remote_code,
    }


def scorer(
    options: RLOptions, place: RoleContext, policy: Loaded | None = None, pretrain: str | None = None
) -> ReferenceRole:
    """A frozen model that scores the policy's tokens: the initial policy, or the model `pretrain`."""
    offload = options.ref_reward_offload
    reference = FrozenScorer(options, policy, place.device, place.mesh, pretrain=pretrain, offload=offload)
    return ReferenceRole(reference, options, place.mesh, "reference" if pretrain is None else "teacher")


def make_optimizer(options: RLOptions, model: nn.Module, learning_rate: float, place: RoleContext) -> Optimizer:
    """An optimizer without a schedule; the trainer sets one when the number of steps is known."""
    return Optimizer(
        model,
        options,
        learning_rate=learning_rate,
        fused=place.device.fused_adam(),
        gradient_dtype=GRADIENT_DTYPES[options.grad_accum_dtype],
        offload=options.adam_offload,
    )


# ---- units and their processes


def make_units_in_processes(options: RLOptions, processes: int) -> list[Unit]:
    return assign_processes(options, make_units(options), processes)


def make_units(options: RLOptions) -> list[Unit]:
    """The units of a run, not yet assigned to processes."""
    shares_policy = has_reference(options) and options.lora_rank > 0
    rollouts = () if options.engines_apart else ("rollouts",)
    actor_roles = ("actor", *rollouts, *(["reference"] if shares_policy else []))
    actor_roles += ("teacher",) if options.teacher_is_base else ()
    units = [Unit("actor", build_actor, actor_roles, engines=rollouts, learns=True)]
    if has_reference(options) and not shares_policy:
        units.append(Unit("reference", build_reference, ("reference",)))
    if options.teacher_model and not options.teacher_is_base:
        units.append(Unit("teacher", build_teacher, ("teacher",)))
    if options.estimator.critic:
        units.append(Unit("critic", build_critic, ("critic",), learns=True))
    if listed(options.reward_pretrain):
        units.append(Unit("reward", build_reward_models, ("reward",)))
    if options.engines_apart:
        build, environment = build_engine_rollouts, engine_environment()
        units.append(Unit("rollouts", build, ("rollouts",), apart=True, environment=environment))
    return units


def assign_processes(options: RLOptions, units: Iterable[Unit], processes: int) -> list[Unit]:
    """Assign units to ranks; `processes`: the number a launcher started (on Ray the options decide instead)."""
    units = list(units)
    if not options.ray:
        return [dataclasses.replace(unit, ranks=options.ranks_of(unit.name, processes)) for unit in units]
    layout = layout_of_units(options, units)
    return [unit if unit.apart else dataclasses.replace(unit, ranks=layout.ranks_of(unit.name)) for unit in units]


def layout_of_units(options: RLOptions, units: Iterable[Unit]) -> Layout:
    return layout_of(options, [unit.name for unit in units if not unit.apart])


# ---- compiled layers


NAMES = ("actor", "critic", "reference", "teacher", "reward")
WRITTEN = 0.5  # assumed mean length of answers, as a fraction of the limit


class LayerCompilation:
    """Compilation of the layers of all roles. `decided`: by role, whether it is compiled; None: undecided."""

    def __init__(self, options: RLOptions, prompts: PromptDataset, files: RunFiles):
        self.decided: dict[str, bool] | None = None
        self.manifest = files.manifest
        self._seconds = 0.0
        answers = options.n_samples_per_prompt * options.generate_max_len * WRITTEN
        self._tokens = files.total * options.rollout_batch_size * (float(prompts.lengths.mean()) + answers)
        self._epochs = options.max_epochs

    def decide(self, roles: Roles, stop: StopRequest) -> None:
        """Decide and compile, before the first iteration of a new or resumed run."""
        before = self.decided
        self.manifest["compiled"] = self.settle(roles)
        if stop.signal:  # the signal may have killed a compiler process, so this decision is dropped
            self.decided = before

    def settle(self, roles: Roles) -> dict[str, bool]:
        """Compile the layers of the roles, or of roles that were rebuilt."""
        decided: dict[str, bool] = {}
        for name in NAMES:
            if (role := getattr(roles, name)) is None:
                continue
            before = None if self.decided is None else self.decided.get(name, False)
            found = role.call("compile_layers", learnt=self._tokens * self._epochs, scored=self._tokens, decided=before)
            decided[name] = found[0]["compiled"]
            self._seconds += found[0]["seconds"]
            for line in found[0]["lines"]:
                print(line, flush=True)
        self.decided = decided
        return decided

    def check(self, roles: Roles) -> None:
        """Before an iteration: switch all roles back to eager layers if compiled ones failed in any of them."""
        compiled = [getattr(roles, name) for name, is_compiled in (self.decided or {}).items() if is_compiled]
        problems = [problem for role in compiled for problem in role.call("layers_problem") if problem]
        if problems:
            for role in compiled:
                role.call("leave_layers_plain")
            self.decided = self.manifest["compiled"] = dict.fromkeys(self.decided or {}, False)
            print(gave_up_line(problems[0]), flush=True)

    def columns(self) -> dict[str, float]:
        """Columns for the first row of metrics."""
        seconds, self._seconds = self._seconds, 0.0
        return {"seconds_compile": seconds} if seconds else {}
