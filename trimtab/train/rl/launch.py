"""From checked options to an RL run: the controller, its dry run, and roles in this process or in several.

The controller has options, prompts, their order, counters and files, and no model. It learns about models by calling
their roles.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from trimtab.config.rl_jobs import RLOptions
from trimtab.data.batches import SampleOrder
from trimtab.data.prompts import PromptDataset
from trimtab.distributed.device import Device, find_device
from trimtab.distributed.launcher import Group, Launcher, LocalProcessLauncher, RoleHost, Unit, launcher_of
from trimtab.distributed.process_group import World, find_world, leave_world, share_signals, stop_was_requested
from trimtab.distributed.ray.placement import table
from trimtab.distributed.supervision import own_heartbeat
from trimtab.errors import Interrupted, RunFailed, UserError
from trimtab.interrupts import StopRequest
from trimtab.models.load import fake_policy
from trimtab.models.parallel.sharded_model import mesh_of
from trimtab.models.policy import TeacherHead
from trimtab.rewards.build import check_columns, check_reward, describe_rewards
from trimtab.rewards.requests import PromptBatch
from trimtab.rewards.types import BadSample, RewardFailed, RewardRequest, RewardResult
from trimtab.rollout.episode import EpisodeRecord, Segment
from trimtab.rollout.factory import why_slow
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.rollout.trajectory import Trajectory
from trimtab.sandbox.process import RunStopped
from trimtab.train.launch import (
    default_line,
    device_notes,
    estimate_samples,
    for_manifest,
    load_job_tokenizer,
    memory_line,
    micro_batch_sizes,
    model_lines,
    one_line,
    saved_passes,
    uses_default_tokens,
    with_default_tokens,
    with_few_rows,
    with_planned_micro_batches,
    without_tokens,
    work_of_prompts,
)
from trimtab.train.proof import prove_without_weights
from trimtab.train.rl.async_source import AsyncSource
from trimtab.train.rl.checks import (
    check_drop_last,
    check_model,
    check_places,
    check_shares,
    check_teacher,
    critic_start,
)
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.files import RunFiles
from trimtab.train.rl.loop import RLRun
from trimtab.train.rl.micro_batches import AnswerSlice, TextMixture, TextSlice, load_text
from trimtab.train.rl.rl_proof import prompt_checks
from trimtab.train.rl.roles import (
    contents_of_environment,
    layout_of_units,
    load_stores,
    make_units_in_processes,
    with_environment_defaults,
    with_routing_replay,
)
from trimtab.train.rl.rollout_client import Evaluation, RolloutClient
from trimtab.train.rl.rollout_worker import (
    Admission,
    Collected,
    FailedGroup,
    FinishedGroup,
    InFlightGroup,
    SampledGroups,
    Wait,
)
from trimtab.train.rl.source import (
    Recording,
    ReplaySource,
    RolloutSource,
    SyncSource,
    prompt_order,
    with_recorded_options,
)
from trimtab.train.rl.state import Roles
from trimtab.train.rl.teacher import TeacherPrompts
from trimtab.train.run_directory import learning_settings, make_manifest
from trimtab.train.update import ChecksTooLarge, InsufficientMemory, RebuildModels


class Controller:
    """Prepares all parts of a run that need no weights, and creates the run from the groups of its roles."""

    def __init__(self, options: RLOptions, device: Device, world: World):
        """`device`: of this process; micro-batches are planned for it if it runs all roles."""
        check_shares(options, self.units(options, world.size))
        check_places(options)
        self.tokenizer = load_job_tokenizer(options)
        self.options, self.world = options, world
        self.stores, self.reports = self._prompts()
        check_columns(self.stores, options)
        store = self.stores["train"]
        self.order = prompt_order(len(store), options, self.episodes())
        check_drop_last(self.order, options)
        self.iterations = count_iterations(self.order, options)
        self.recording = Recording.of(options, store)
        if options.replay:
            assert self.recording is not None
            self.recording.check_holds(self.order.steps, self.iterations)
            if line := self.recording.async_line(options):
                world.say(line)
        self.teacher_prompts: TeacherPrompts | None = None
        self.check_models()
        self.options, self.memory_plan = with_planned_micro_batches(
            options, device, world, lambda: work_of_prompts(options, self.stores)
        )
        self.default_tokens = uses_default_tokens(options, device)
        if not options.ray:  # on Ray the devices are on other machines
            for line in device_notes(options, device):
                world.say(line)

    @staticmethod
    def units(options: Any, processes: int) -> list[Unit]:
        """The units of the run and their processes, the same in every process."""
        return make_units_in_processes(options, processes)

    def episodes(self) -> int:
        return self.options.num_episodes

    def load_stores(self) -> tuple[dict[str, PromptDataset], dict[str, Any]]:
        return load_stores(self.options, self.tokenizer)

    def check_models(self) -> None:
        policy = fake_policy(self.options)
        check_model(policy, self.options, self.stores)
        if self.options.is_taught:
            self.teacher_prompts = check_teacher(self.options, self.tokenizer, policy, self.stores["train"])
        if self.options.estimator.critic:
            _, note = critic_start(self.options, self.tokenizer)
            if note:
                self.world.say(note)

    def _prompts(self) -> tuple[dict[str, PromptDataset], dict[str, Any]]:
        with own_heartbeat.waiting():  # reading the data has no time limit
            stores, reports = self.load_stores()
        self.text = None
        if self.options.pretrain_data:
            self.text, reports["text"] = load_text(self.options, self.tokenizer)
        for report in reports.values():
            for line in report.lines():
                self.world.say(line)
        return stores, reports

    # ---- the run

    def run(self, groups: dict[str, Group], placement: dict[str, Any] | None = None) -> RLRun:
        """Create the run; `placement`: facts on where the roles are, for the manifest."""
        actor = groups["actor"].call("describe")[0]
        if self.default_tokens:
            if actor["path"] != "packed":
                self.options = without_tokens(self.options)
            elif self.options.use_dynamic_batch:  # False in a run resumed from a version without it
                self.world.say(default_line(self.options))
        options = self.options
        if actor["path"] == "logits":
            unread = f"of --pretrain {options.pretrain} cannot be read"
            if options.teaches_vocabulary:
                raise UserError(f"--teacher_divergence {options.teacher_divergence}: the LM head {unread}; use sampled")
            if options.aux_loss_coef > 0:
                raise UserError(f"--aux_loss_coef {options.aux_loss_coef}: the router {unread}; drop it")
        fewer = {name: group for name, group in groups.items() if len(group.ranks) < self.world.size}
        if fewer and not options.ray:
            counts = (f"{name} in {len(group.ranks)}" for name, group in fewer.items())
            self.world.say(f"of {self.world.size} processes: {', '.join(counts)}")
        for line in actor["notes"]:
            self.world.say(line)
        if options.deepspeed_enable_sleep and actor["device"]["device_type"] == "cpu":
            self.world.say("--deepspeed_enable_sleep has no effect here: what learning needs is in main memory anyway")
        sampling = SamplingParams(
            max_new_tokens=options.generate_max_len,
            n=options.n_samples_per_prompt,
            temperature=options.temperature,
            top_p=options.top_p,
            min_new_tokens=options.generate_min_len,
            repetition_penalty=options.repetition_penalty,
            stop_token_ids=tuple(actor["stop_token_ids"]),
        )
        evaluation = None
        if "evaluation" in self.stores:
            eval_sampling = dataclasses.replace(
                sampling, n=options.eval_n_samples_per_prompt, temperature=options.eval_temperature, top_p=1.0
            )
            evaluation = Evaluation(self.stores["evaluation"], eval_sampling, options.failed_reward_share)
        text = None if self.text is None else TextMixture(self.text, options)
        client = RolloutClient(self.stores, self.tokenizer, groups["rollouts"], groups.get("reward"))
        if options.exact == "on" and not (client.engine_exact or options.replay):
            raise UserError("--exact on: the engine's kernels failed their check (see the warning above); leave it out")
        self.world.say(f"reward: {describe_rewards(client.in_words, options)}")
        if not (actor["not_exact"] or client.engine_exact or options.replay):
            actor["not_exact"] = "the engine's kernels failed their check"
        manifest = self.manifest(actor, client.reward_sum.name) | (placement or {})
        if self.recording is not None:
            self.recording.sampler = {name: manifest[name] for name in ("device_type", "dtype")}
            self.recording.sampler |= {"exact": client.exact and not options.outlives_updates}
        more = evaluation, text, self.teacher_prompts
        run = self.make_run(groups, client, self.make_source(sampling, client), sampling, manifest, *more)
        run.reports = self.reports
        return run

    def make_source(self, sampling: SamplingParams, client: RolloutClient) -> RolloutSource:
        if self.options.replay:
            assert self.recording is not None
            return ReplaySource(self.recording, client)
        source: RolloutSource
        if self.options.outlives_updates:
            source = AsyncSource(self.options, self.order, sampling, client, self.iterations)
        else:
            source = SyncSource(self.options, self.order, sampling, client)
        source.recording = self.recording
        return source

    def make_run(
        self,
        groups: dict[str, Group],
        client: RolloutClient,
        source: RolloutSource,
        sampling: SamplingParams,
        manifest: dict,
        *more: Any,
    ) -> RLRun:
        files = RunFiles(self.options, manifest, self.tokenizer, self.iterations, self.stores)
        return RLRun(self.options, Roles(**groups), client, source, self.order, files, *more)

    def manifest(self, actor: dict[str, Any], reward: str) -> dict:
        """`actor`: the result of the policy role's `describe`."""
        options = self.options
        return make_manifest(
            job=options.verb,
            weights=actor["weights"],
            data_order=self.order.fingerprint(self.stores["train"].fingerprint),
            seed=options.seed,
            dtype="bfloat16" if options.bf16 else "float32",
            device=actor["device"],
            path=actor["path"],
            not_exact="vLLM uses other kernels" if options.uses_vllm else actor["not_exact"],
            model=options.pretrain,
            trainable=actor["trainable"],
            parameters=actor["parameters"],
            trainable_parameters=actor["trainable_parameters"],
            steps=self.iterations,
            settings=learning_settings(options),
            processes=self.world.size,
            zero_stage=options.zero_stage,
            reward=reward,
            data={name: report.as_dict() for name, report in self.reports.items()},
            **contents_of_environment(options),
            passes=micro_batch_sizes(options, packed=True),
            **for_manifest(self.memory_plan),
        )


def count_iterations(prompts: SampleOrder, options: RLOptions) -> int:
    whole = -(-prompts.steps // options.rollout_batch_size)
    return min(whole, options.max_steps) if options.max_steps > 0 else whole


# ---- the dry run


# The process of a dry run has none of the cluster's devices.
CLUSTER_MEMORY = "memory: trimtab plan --nodes N --gpus M says what fits on a cluster"


def dry_run_rl(
    options: RLOptions,
    load_stores: Callable[[Any, Any], tuple] = load_stores,
    episodes: int | None = None,
    units: Callable[[Any, int], list[Unit]] = make_units_in_processes,
) -> list[str]:
    """Run all checks that precede the first step, on a few rows and without weights; returns the lines to print."""
    options, device = with_environment_defaults(with_recorded_options(options)), find_device()
    options = with_routing_replay(options)
    described = units(options, options.processes)
    check_shares(options, described)
    placement = table(layout_of_units(options, described).rows()) if options.ray else []
    check_places(options)
    tokenizer = load_job_tokenizer(options)
    few = with_few_rows(options)
    stores, reports = load_stores(few, tokenizer)
    if options.plays and not options.prompt_data and reports["train"].rows_read == few.max_samples:
        # An environment that fills every request for rows will also fill the run's request.
        reports["train"].rows_available = min(options.env_rows, options.max_samples)
    if options.pretrain_data:
        load_text(few, tokenizer)
    check_columns(stores, options)
    model = fake_policy(options)
    check_model(model, options, stores)
    if options.is_taught and (taught := check_teacher(options, tokenizer, model, stores["train"])):
        taught.close()
    note = critic_start(options, tokenizer)[1] if options.estimator.critic else None
    rewarded = check_reward(options, device, tokenizer, stores["train"])
    played: list[str] = []
    if options.plays:
        from trimtab.server.environment_factory import check_environment

        first = PromptBatch.of(stores["train"], [(0, request_seed(options.seed, 0))], rewarded=True)
        plain = not options.apply_chat_template
        played = check_environment(options, first.tasks()[0], first.ids[0], tokenizer, plain=plain)
    order = prompt_order(len(stores["train"]), options, episodes or options.num_episodes)
    replayed = None
    if options.replay and (recording := Recording.of(options)):
        # The run itself knows all prompts, and checks more.
        recording.check_holds(order.steps, count_iterations(order, options))
        replayed = recording.async_line(options)
    prompts, about = estimate_samples(reports["train"], options.max_samples, len(stores["train"]))
    whole = dataclasses.replace(order, samples=prompts)
    if not about:
        check_drop_last(whole, options)
    described_model = model_lines(model, options, device)
    slow = "" if options.uses_vllm else why_slow(model)
    cut = []
    if model.path == "packed" and uses_default_tokens(options, device):
        options = with_default_tokens(options, device)
        cut = [default_line(options)]
    return [
        f"device: {device.name}",
        *placement,
        *device_notes(options, device),
        *(line for line in (note, replayed) if line),
        *described_model,
        f"engine: {'vLLM' if options.uses_vllm else 'built-in'}{slow and f', slow: {slow}'}",
        f"data: {reports['train'].in_files:,} prompts give {'about ' if about else ''}"
        f"{count_iterations(whole, options):,} iterations of {options.updates_per_iteration} updates",
        f"first prompt, as the policy reads it: {one_line(stores['train'].text(0))}",
        *rewarded,
        *prove_without_weights(options, prompt_checks(options, stores, reports, tokenizer)),
        *played,
        *cut,
        CLUSTER_MEMORY if options.ray else memory_line(options, device, lambda: work_of_prompts(options, stores)),
    ]


# ---- from checked options to a run


# The only record types that may be sent to roles and back.
RECORDS = (
    *(AnswerSlice, TextSlice, SamplingParams, PromptBatch, SampledGroups, FailedGroup, Experience),
    *(Trajectory, EpisodeRecord, Segment, InFlightGroup, Admission, FinishedGroup, Collected, Wait),
    *(RewardRequest, RewardResult, RewardFailed, BadSample, InsufficientMemory, TeacherHead),
)


def train_locally(options: RLOptions, kind: type[Controller]) -> None:
    """Train in this process, or in the processes that a launcher such as torchrun started."""
    device = find_device()
    try:
        world = find_world(device)
        # In every process, because each builds its roles from the same options.
        options = with_default_tokens(options, device, saved_passes(options, world))
        with StopRequest() as stop, share_signals(stop, world):
            launcher = launcher_of(
                RoleHost(options, kind.units(options, world.size), mesh_of, device, world, stop), RECORDS
            )
            try:
                if isinstance(launcher, LocalProcessLauncher) and not world.is_rank_zero:
                    with interruptible(stop, world, "stopped with the first process"):
                        return launcher.serve()
                train(set_up(options, kind, launcher), launcher, stop)
            finally:
                launcher.close()
    finally:
        leave_world()


def set_up(options: RLOptions, kind: type[Controller], launcher: Launcher) -> RLRun:
    """Create the controller, the roles and the run, up to the first step."""
    with interruptible(launcher.stop, launcher.world, "stopped before the first step; nothing is lost"):
        with disconnecting(launcher):
            controller = kind(options, launcher.device, launcher.world)
        # From here on other processes may be inside a call, so a failure must not try to disconnect them.
        return controller.run(launcher.groups(controller.options), launcher.described())


def train(run: RLRun, launcher: Launcher, stop: StopRequest) -> None:
    """Run the loop, and rebuild the roles and continue when one of several processes runs out of memory."""
    again = False
    with contextlib.nullcontext() if run.teaching is None else contextlib.closing(run.teaching):
        while True:
            try:
                with disconnecting(launcher):
                    run.train(stop, rebuilt=again)
                return launcher.disconnect()
            except RebuildModels as why:
                again = not isinstance(why, ChecksTooLarge)
            with interruptible(stop, launcher.world, "stopped; --load_checkpoint goes on from the last checkpoint"):
                run.use(launcher.rebuild_groups())


@contextlib.contextmanager
def disconnecting(launcher: Launcher) -> Iterator[None]:
    """Disconnect the other processes when a run ends early on purpose."""
    try:
        yield
    except (Interrupted, RunFailed, UserError):
        launcher.disconnect()
        raise


@contextlib.contextmanager
def interruptible(stop: StopRequest, world: World, message: str) -> Iterator[None]:
    """Raise Interrupted for an error inside if a stop was requested: a wait was given up here, or a peer has left."""
    try:
        yield
    except (RunStopped, RunFailed, RuntimeError) as error:
        if not isinstance(error, RunStopped) and not stop_was_requested(stop, world):
            raise
        raise Interrupted(stop.number, message) from None
