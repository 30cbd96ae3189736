"""From checked options to an RL run: prompts, models, rewards and the roles that hold them; then the loop."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from trimtab.config.jobs import RLOptions, TailOptions
from trimtab.data.batches import Span
from trimtab.data.order import SampleOrder
from trimtab.data.prompts import PromptStore, load_prompt_stores
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import Device, find_device, random_state, restore_random_state, seed_everything
from trimtab.distributed.roles import AGAIN, Alone, Switchboard
from trimtab.distributed.sharding import GRADIENT_DTYPES
from trimtab.distributed.stopping import heard_by_all, was_told
from trimtab.distributed.watch import pulse
from trimtab.distributed.world import World, find_world, leave_world
from trimtab.errors import Interrupted, RunFailed, UserError
from trimtab.files import check_folder
from trimtab.interrupts import StopRequest
from trimtab.models.critic import Critic
from trimtab.models.hugging_face import check_model_folder
from trimtab.models.load import load_policy, load_reward_model, policy_skeleton
from trimtab.models.packed import PackedModel
from trimtab.models.policy import Policy
from trimtab.models.sharded import mesh_of
from trimtab.rewards.build import build_reward, in_words
from trimtab.rewards.labels import check_labels
from trimtab.rewards.model import same_tokenizer
from trimtab.rewards.trial import try_reward
from trimtab.rewards.types import BadSample, RewardFailed
from trimtab.rewards.waiting import GivenUp
from trimtab.rollout.choose import build_engine
from trimtab.rollout.stopping import stop_tokens
from trimtab.rollout.types import Sampling
from trimtab.train.launch import check_undivided, load_job_tokenizer, notes, of_few_rows
from trimtab.train.manifest import make_manifest, names_fingerprint, settings
from trimtab.train.optimiser import Optimiser
from trimtab.train.pass_limit import BeginAnew, NoRoom, PassLimit
from trimtab.train.plan.passes import for_manifest, with_planned_passes, work_of_prompts
from trimtab.train.reference import Reference
from trimtab.train.rehearsal import memory_line, one_line, usable_rows
from trimtab.train.rl.batches import AnswerBatch, TextBatch
from trimtab.train.rl.cut import updates_per_iteration
from trimtab.train.rl.evaluation import Evaluation
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.files import RunFiles
from trimtab.train.rl.learner import Actor, CriticLearner, Learner, ReferenceRole
from trimtab.train.rl.loop import Counters, Iteration, RLRun, Roles
from trimtab.train.rl.recording import Recording
from trimtab.train.rl.rollouts import Rollouts
from trimtab.train.rl.text import TextMixture, load_text
from trimtab.train.tensor_parts import HeldParts

# What goes to the roles and comes back; nothing else may.
RECORDS = (AnswerBatch, TextBatch, Span, Sampling, Experience, RewardFailed, BadSample, NoRoom)


@dataclasses.dataclass
class Carried:
    """What a process keeps of a run that is begun anew because memory was short: its own parts of what was learnt;
    the first process also where the loop was."""

    learners: dict[str, HeldParts]
    random: dict
    counters: Counters | None = None
    iteration: Iteration | None = None
    limit: PassLimit | None = None


def train_rl(options: RLOptions, builder_class: type["Builder"] | None = None) -> None:
    device = find_device()
    try:
        world, carried = find_world(device), None
        with StopRequest() as stop, heard_by_all(stop, world):
            while True:
                try:
                    builder = (builder_class or Builder)(options, device, world, stop)
                except (GivenUp, RuntimeError) as error:  # the latter: another process has left a collective
                    if isinstance(error, RuntimeError) and not was_told(stop, world):
                        raise
                    raise Interrupted(stop.number, "stopped before the first step; nothing is lost") from None
                try:
                    carried = _run(builder, stop, carried)
                finally:
                    builder.reward.close()
                if carried is None:
                    return
                del builder
                device.release_memory()
    finally:
        leave_world()


def _run(builder: "Builder", stop: StopRequest, carried: Carried | None) -> Carried | None:
    """The loop, in the first process; the others serve it. What it returns is for a run that begins anew."""
    if carried is not None:
        builder.take_over(carried)
    if builder.world.size == 1:
        groups = {name: Alone(role) for name, role in builder.roles.items()}
        builder.run(groups).train(stop)
        return None
    switchboard = Switchboard(builder.world, builder.roles, RECORDS)
    if not builder.world.leads:
        return builder.carry() if switchboard.serve() == AGAIN else None
    run = builder.run({name: switchboard.group(name) for name in builder.roles})
    if carried is not None:
        assert carried.counters is not None and carried.limit is not None, "the first process knows where the loop was"
        run.counters, run.iteration, run.passes.limit = carried.counters, carried.iteration, carried.limit
    try:
        run.train(stop, taken_over=carried is not None)
    except BeginAnew:
        switchboard.hang_up(AGAIN)
        return dataclasses.replace(
            builder.carry(), counters=run.counters, iteration=run.iteration, limit=run.passes.limit
        )
    except (Interrupted, RunFailed, UserError):
        with contextlib.suppress(RuntimeError):  # the others may be gone already
            switchboard.hang_up()
        raise
    switchboard.hang_up()
    return None


class Builder:
    """Everything one process holds: every process builds the same, and the first one runs the loop over it."""

    def __init__(self, options: RLOptions, device: Device, world: World, stop: StopRequest):
        self.options, self.device, self.world = options, device, world
        check_undivided(options, world)
        self.mesh = mesh_of(options, world)
        _check_places(options)
        self.tokenizer = load_job_tokenizer(options)
        self.stores, self.reports = self._prompts()
        check_labels(self.stores, options.reward_verifier, options.label_key)
        store = self.stores["train"]
        self.order = SampleOrder(len(store), 1, self._episodes(), options.seed)
        self.iterations = iterations_of(self.order, options)
        self.recording = Recording.of(options, store)
        if options.replay:
            assert self.recording is not None
            self.recording.check_holds(self.order.steps)
        options, self.memory_plan = with_planned_passes(
            options, device, world, lambda: work_of_prompts(options, self.stores)
        )
        self.options = options
        seed_everything(options.seed, deterministic=options.full_determinism)
        self.loaded = load_policy(options, device, self.mesh)
        check_model(self.loaded.model, options, self.stores)
        for line in (*notes(options, device), *self.loaded.notes):
            world.say(line)
        self.reward = build_reward(options, device, self.tokenizer, stop.requested)
        world.say(f"reward: {in_words(self.reward, options)}")
        self.roles = self._roles(stop)
        # Dropout differs between processes, everything else does not.
        seed_everything(options.seed + 1_000_003 * world.rank, deterministic=options.full_determinism)

    def _actor_class(self) -> type[Actor]:
        return Actor

    def _episodes(self) -> int:
        return self.options.num_episodes

    def _load_stores(self) -> tuple[dict[str, PromptStore], dict[str, Any]]:
        return load_prompt_stores(self.options, self.tokenizer)

    def _prompts(self) -> tuple[dict[str, PromptStore], dict[str, Any]]:
        if not self.world.leads:
            self.world.wait()  # the first process fills the caches for all
        with pulse.waiting():  # reading the data takes as long as there are data
            stores, reports = self._load_stores()
        self.text = None
        if self.options.pretrain_data:
            self.text, reports["text"] = load_text(self.options, self.tokenizer)
        if self.world.leads:
            self.world.wait()
        for report in reports.values():
            for line in report.lines():
                self.world.say(line)
        return stores, reports

    def _roles(self, stop: StopRequest) -> dict[str, Any]:
        options, device, mesh = self.options, self.device, self.mesh
        policy = self.loaded.model
        roles: dict[str, Any] = {}
        if options.init_kl_coef > 0:
            roles["reference"] = self._scorer(None)
        if options.teacher_model:
            check_teacher(options, self.tokenizer)
            roles["teacher"] = self._scorer(options.teacher_model)
        optimiser = self._optimiser(policy.model, options.actor_learning_rate)
        roles["actor"] = self._actor_class()(options, policy, optimiser, self.tokenizer, device, mesh)
        if options.estimator.critic:
            roles["critic"] = self._critic()
        roles["rollouts"] = self._rollouts(policy, stop)
        return roles

    def _rollouts(self, policy: Policy, stop: StopRequest) -> Rollouts:
        options = self.options
        engine = build_engine(
            policy,
            self.tokenizer,
            slots=options.rollout_slots,
            kv_tokens=options.rollout_kv_tokens,
            weight_only_int8=options.weight_only_int8,
        )
        return Rollouts(engine, self.reward, self.stores, self.tokenizer, stop.requested)

    def _scorer(self, pretrain: str | None) -> ReferenceRole:
        """A frozen model that scores the policy's tokens; None: what the policy was at the start."""
        options, offload = self.options, self.options.ref_reward_offload
        reference = Reference(options, self.loaded, self.device, self.mesh, pretrain=pretrain, offload=offload)
        return ReferenceRole(reference, options.temperature)

    def _critic(self) -> CriticLearner:
        options = self.options
        name, note = critic_start(options, self.tokenizer)
        if note:
            self.world.say(note)
        tokenizer = copy.deepcopy(self.tokenizer)  # a classifier may need another padding token
        its_options = dataclasses.replace(options, pretrain=name)
        loaded = load_reward_model(its_options, self.device, tokenizer, self.mesh, root=Critic)
        if options.normalize_reward and name == first_reward(options):
            loaded.model.mean, loaded.model.deviation = loaded.model.config.mean, loaded.model.config.std
        optimiser = self._optimiser(loaded.model.model, options.critic_learning_rate)
        return CriticLearner(options, loaded.model, optimiser, tokenizer, self.device, self.mesh)

    def _optimiser(self, model: nn.Module, learning_rate: float, updates: int | None = None) -> Optimiser:
        """`updates`: optimiser steps of an iteration, if not the policy's."""
        options = self.options
        return Optimiser(
            model,
            options,
            self.iterations * (updates or updates_per_iteration(options)),
            learning_rate=learning_rate,
            fused=self.device.fused_adam(),
            gradient_dtype=GRADIENT_DTYPES[options.grad_accum_dtype],
            offload=options.adam_offload,
        )

    def carry(self) -> Carried:
        learners = {name: role for name, role in self.roles.items() if isinstance(role, Learner)}
        return Carried({name: role.carry() for name, role in learners.items()}, random_state())

    def take_over(self, carried: Carried) -> None:
        for name, held in carried.learners.items():
            self.roles[name].restore(held)
        restore_random_state(carried.random)

    def run(self, groups: dict[str, Any]) -> RLRun:
        options = self.options
        sampling = Sampling(
            max_new_tokens=options.generate_max_len,
            n=options.n_samples_per_prompt,
            temperature=options.temperature,
            top_p=options.top_p,
            stop_token_ids=stop_tokens(self.loaded.model, self.tokenizer),
        )
        evaluation = None
        if "evaluation" in self.stores:
            eval_sampling = dataclasses.replace(
                sampling, n=options.eval_n_samples_per_prompt, temperature=options.eval_temperature, top_p=1.0
            )
            evaluation = Evaluation(self.stores["evaluation"], eval_sampling)
        text = None if self.text is None else TextMixture(self.text, options)
        return self._make_run(groups, sampling, evaluation, text, self.recording)

    def _make_run(self, groups: dict[str, Any], sampling: Sampling, *more: Any) -> RLRun:
        files = RunFiles(self.options, self._manifest(), self.tokenizer, self.device, self.iterations, self.stores)
        return RLRun(self.options, Roles(**groups), self.order, sampling, files, *more)

    def _manifest(self) -> dict:
        options, actor = self.options, self.roles["actor"]
        return make_manifest(
            job=options.verb,
            weights=self.loaded.weights,
            data_order=self.order.fingerprint(self.stores["train"].fingerprint),
            seed=options.seed,
            dtype="bfloat16" if options.bf16 else "float32",
            device=self.device,
            path=actor.model.path,
            model=options.pretrain,
            trainable=names_fingerprint(actor.optimiser.working),
            parameters=sum(p.numel() for p in actor.model.parameters()),
            trainable_parameters=sum(p.numel() for p in actor.optimiser.working.values()),
            steps=self.iterations,
            settings=settings(options),
            processes=self.world.size,
            zero_stage=options.zero_stage,
            reward=self.reward.name,
            data={name: report.as_dict() for name, report in self.reports.items()},
            **for_manifest(self.memory_plan),
        )


def iterations_of(prompts: SampleOrder, options: RLOptions) -> int:
    whole = -(-prompts.steps // options.rollout_batch_size)
    return min(whole, options.max_steps) if options.max_steps > 0 else whole


def rehearse_rl(
    options: RLOptions, load_stores: Callable[[Any, Any], tuple] = load_prompt_stores, episodes: int | None = None
) -> list[str]:
    """Everything that can go wrong before the first step, on a few rows and without the weights."""
    device = find_device()
    _check_places(options)
    tokenizer = load_job_tokenizer(options)
    few = of_few_rows(options)
    stores, reports = load_stores(few, tokenizer)
    if options.pretrain_data:
        load_text(few, tokenizer)
    check_labels(stores, options.reward_verifier, options.label_key)
    model = policy_skeleton(options)
    check_model(model, options, stores)
    if options.teacher_model:
        check_teacher(options, tokenizer)
    note = critic_start(options, tokenizer)[1] if options.estimator.critic else None
    rewarded = try_reward(options, device, tokenizer, stores["train"])
    order = SampleOrder(len(stores["train"]), 1, episodes or options.num_episodes, options.seed)
    if options.replay and (recording := Recording.of(options)):
        recording.check_holds(order.steps)  # the run itself knows all prompts, and asks for more
    prompts, about = usable_rows(reports["train"], options.max_samples, len(stores["train"]))
    whole = dataclasses.replace(order, samples=prompts)
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return [
        f"device: {device.name}",
        *notes(options, device),
        *([note] if note else []),
        f"model: {type(model.inner).__name__}, {parameters:,} parameters, {trained:,} trained",
        f"data: {reports['train'].in_files:,} prompts give {'about ' if about else ''}"
        f"{iterations_of(whole, options):,} iterations of {updates_per_iteration(options)} updates",
        f"first prompt, as the policy reads it: {one_line(stores['train'].text(0))}",
        *rewarded,
        memory_line(options, device, lambda: work_of_prompts(options, stores)),
    ]


def check_model(model: PackedModel, options: RLOptions, stores: dict[str, PromptStore]) -> None:
    """Refuse a model this job cannot train, in one line."""
    config, name = model.config.get_text_config(), type(model.inner).__name__
    longest = max(int(store.lengths.max()) for store in stores.values()) + options.generate_max_len
    room = getattr(config, "max_position_embeddings", None)
    if room is not None and longest > room:
        raise UserError(
            f"--generate_max_len {options.generate_max_len}: with the longest prompt that is {longest} tokens, but "
            f"{name} has a context of {room}; lower it, or --prompt_max_len"
        )
    largest = max(int(store.largest_token) for store in stores.values())
    if largest >= config.vocab_size:
        raise UserError(
            f"--pretrain {options.pretrain}: its tokenizer made token {largest} of the data, but the model "
            f"knows only {config.vocab_size} tokens; copy the model's own tokenizer there"
        )
    if options.aux_loss_coef > 0 and not hasattr(model.config, "num_experts_per_tok"):
        raise UserError(f"--aux_loss_coef {options.aux_loss_coef}: {name} has no experts; drop it")


def check_teacher(options: RLOptions, tokenizer: Any) -> None:
    """A teacher judges the policy's tokens, so they must mean the same to it."""
    assert options.teacher_model is not None
    if not _reads_tokens(options.teacher_model, "--teacher_model", options, tokenizer):
        raise UserError(f"--teacher_model {options.teacher_model}: its tokenizer is not --pretrain's; use one that is")


def critic_start(options: RLOptions, tokenizer: Any) -> tuple[str, str | None]:
    """The model that the critic starts from, and what there is to say of the choice. It reads the policy's tokens."""
    if name := options.critic_pretrain:
        if not _reads_tokens(name, "--critic_pretrain", options, tokenizer):
            raise UserError(f"--critic_pretrain {name}: its tokenizer is not --pretrain's; use one that is")
        return name, None
    reward = first_reward(options)
    if reward is None or _reads_tokens(reward, "--reward_pretrain", options, tokenizer):
        return reward or options.pretrain, None
    return options.pretrain, f"the critic starts from the policy: {reward} has another tokenizer"


def first_reward(options: RLOptions) -> str | None:
    """The first reward model."""
    return options.reward_pretrain.split(",")[0].strip() if options.reward_pretrain else None


def _reads_tokens(name: str, flag: str, options: RLOptions, tokenizer: Any) -> bool:
    """Whether the policy's tokens mean the same to this model."""
    theirs = load_tokenizer(name, disable_fast=options.disable_fast_tokenizer, flag=flag)
    return name == options.pretrain or same_tokenizer(tokenizer, theirs)


def _check_places(options: RLOptions) -> None:
    """Before anything slow: are the models there, and can their successors be written?"""
    check_model_folder(options.pretrain, "--pretrain")
    for flag, name in (("critic_pretrain", options.critic_pretrain), ("teacher_model", options.teacher_model)):
        if name:
            check_model_folder(name, f"--{flag}")
    for name in (options.reward_pretrain or "").split(","):
        if name.strip():
            check_model_folder(name.strip(), "--reward_pretrain")
    places = {"save_path": options.save_path, "ckpt_path": options.ckpt_path, "record": options.record}
    places |= {"use_tensorboard": options.use_tensorboard, "use_visualdl": options.use_visualdl}
    if isinstance(options, TailOptions):
        places |= {"save_info_path": options.save_info_path, "negdata_path": options.negdata_path}
    for flag, place in places.items():
        if place:
            check_folder(flag, Path(place))
    if options.record and not options.load_checkpoint and (recording := Recording.of(options)):
        recording.check_empty()
