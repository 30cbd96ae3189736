"""`--rehearse N`: this process plays one rank of a run of N processes on its own device (distributed/fake_world).

The job's own loaders, mesh, losses and optimizer run three steps on random tokens of the longest samples that the
options allow; in the first, samples are so much shorter that they fill the rows, which takes the most memory. Memory
and arithmetic are real and measured by phase; collectives return at once, and the time of their bytes is added at the
link speeds of the plan's hardware table. Layers are not compiled, and rollouts are not sampled: the engine's gathered
weights and KV cache are allocated, and one prefill is run. Nothing is written.
"""

import contextlib
import dataclasses
import math
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimtab.config.jobs import SupervisedOptions, TrainedOptions
from trimtab.config.rl_jobs import RLOptions
from trimtab.data.batches import TokenBatch
from trimtab.data.dataset import DataReport, TokenDataset
from trimtab.data.examples import LabelledDataset, PairDataset, StepDataset
from trimtab.distributed.device import (
    Device,
    allocator_of,
    find_device,
    free_memory,
    is_out_of_memory,
    keep_freed_memory,
    private_bytes,
    return_freed_memory,
    total_memory,
)
from trimtab.distributed.fake_world import Traffic, fake_world, traffic
from trimtab.distributed.fsdp import gathered, local, reshard_model
from trimtab.distributed.launcher import Group, Processes, RoleHost
from trimtab.distributed.process_group import World
from trimtab.errors import OutOfMemory, UserError
from trimtab.interrupts import StopRequest
from trimtab.models.load import TrainedModelOptions, fake_policy
from trimtab.models.packed import PackedModel, scoring
from trimtab.models.parallel.sharded_model import check_parallel_options, mesh_of
from trimtab.models.policy import Policy
from trimtab.models.pretrained import quiet_transformers
from trimtab.models.weight_export import HFWeights
from trimtab.plan.hardware import GIB, LINK_SHARE, ClusterHardware, of_device, shared
from trimtab.plan.layouts import Split
from trimtab.plan.memory import FILL, sampling_bytes
from trimtab.plan.planner import Plan, Planner
from trimtab.plan.workload import (
    RowShape,
    job_models,
    packs_by_tokens,
    refuse_unplannable,
    supposed,
    with_sized_models,
)
from trimtab.rollout.factory import EngineMemory
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.launch import with_default_tokens, with_planned_micro_batches
from trimtab.train.optimizer import Optimizer, OptimizerStep
from trimtab.train.rl.checks import check_context
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.micro_batches import MicroBatcher, TextMixture, all_mini_batches
from trimtab.train.rl.roles import make_units_in_processes
from trimtab.train.rl.teacher import Teaching
from trimtab.train.supervised import TASKS, build_run
from trimtab.train.supervised_tasks import KTOTask, PRMTask
from trimtab.train.task import FrozenScorer, PairTask, SupervisedTask
from trimtab.train.update import MicroBatchLimit

STEPS = 3
GPUS, NETWORK = 8, 100e9  # devices of a machine, and bytes a second in and out of it, as `trimtab plan` assumes
PHASES = ("load", "rollout", "scoring", "forward", "backward", "optimizer", "export")
SAMPLE_SECONDS = 0.002
STEP_TOKENS = 32  # of a judged step of process rewards


def rehearse(options: TrainedOptions) -> "Rehearsal":
    """Play the job's rank. UserError: it does not fit, or cannot be rehearsed."""
    assert isinstance(options, TrainedModelOptions) and options.rehearse is not None
    if isinstance(options, RLOptions) and (options.ray or options.trainer != "rl" or options.plays):
        raise UserError("--rehearse plays the processes of one launcher: without --ray, environments and tail methods")
    quiet_transformers()
    device, size, size_or_name = find_device(), options.rehearse, options.pretrain
    with tempfile.TemporaryDirectory() as folder:
        sized = with_sized_models(options, Path(folder))
        if options.load_in_4bit and sized.pretrain != size_or_name:
            raise UserError(f"--load_in_4bit: --pretrain {size_or_name} has no weights to quantize; name a folder")
        for name in ("pretrain", "critic_pretrain", "ref_pretrain", "teacher_model"):
            if named := getattr(sized, name, None):
                check_parallel_options(named, sized, f"--{name}")
        options = with_default_tokens(sized, device)
        if isinstance(options, RLOptions):
            check_context(fake_policy(options), options, supposed(options).rows.prompt)
        plan = _plan(options, device, size)
        if plan is not None and not device.is_accelerator:  # main memory that runs out ends the process without a word
            needed, there = plan.memory.peak / GIB, total_memory(device.torch) / GIB
            if needed > there:
                raise UserError(_too_large(f"it takes about {needed:.0f} GiB, and this machine has {there:.0f}", None))
        with fake_world(device, options.rehearse_rank, size) as world:
            meter = PhaseMeter(device)
            try:
                steps = (
                    _play_rl(options, device, world, meter)
                    if isinstance(options, RLOptions)
                    else _play_supervised(options, device, world, meter)
                )
            except (OutOfMemory, RuntimeError, MemoryError) as error:
                if not isinstance(error, OutOfMemory) and not is_out_of_memory(error):
                    raise
                raise UserError(_too_large(f"out of memory in the {meter.phase} phase", plan)) from error
            finally:
                meter.close()
        return Rehearsal(f"{options.verb} of {size_or_name}", options, device, meter, steps, plan)


def _machines(device: Device, size: int) -> ClusterHardware:
    each = size if size < GPUS else math.gcd(size, GPUS)
    return ClusterHardware(shared(of_device(device), size), size // each, each, NETWORK)


def _plan(options: TrainedModelOptions, device: Device, size: int) -> Plan | None:
    """The plan of the same job and layout; None: it cannot be planned."""
    try:
        refuse_unplannable(options)
        planner = Planner(options, _machines(device, size), supposed(options), propose=False)
        return Plan(planner, planner.one_pool())
    except (UserError, RuntimeError):
        return None


# ---- memory and seconds by phase


def _nothing(*_: Any, **__: Any) -> None:
    return None


class PhaseMeter:
    """Peak memory of each phase, of all steps; seconds of each phase in the current step."""

    def __init__(self, device: Device):
        self.device, self.phase = device, "load"
        self.peaks, self.seconds = dict[str, int](), defaultdict[str, float](float)
        self._allocator, self._began, self._ended = allocator_of(device.torch), time.monotonic(), threading.Event()
        self.before = 0  # bytes of the program
        if self._allocator is None:  # main memory: what this process has more than before, sampled
            return_freed_memory()
            self.before = private_bytes()
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        else:
            self._allocator.reset_peak_memory_stats(device.torch)

    def enter(self, phase: str) -> None:
        if self._allocator is not None:
            self._allocator.synchronize(self.device.torch)
            self._note(self._allocator.max_memory_allocated(self.device.torch))
            self._allocator.reset_peak_memory_stats(self.device.torch)
        now = time.monotonic()
        self.seconds[self.phase] += now - self._began
        self.phase, self._began = phase, now

    def around(self, owner: Any, name: str, phase: str, after: str | None = None) -> None:
        """Enter `phase` when this method of an object is called, and `after` (the phase before) when it returns."""
        call = getattr(owner, name)

        def measured(*arguments: Any, **named: Any) -> Any:
            before = self.phase
            self.enter(phase)
            result = call(*arguments, **named)
            self.enter(after or before)
            return result

        setattr(owner, name, measured)

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    def close(self) -> None:
        self.enter(self.phase)
        self._ended.set()
        if self._allocator is None:
            keep_freed_memory()

    def _note(self, size: int) -> None:
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), size)

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self._note(private_bytes() - self.before)


@dataclasses.dataclass
class RehearsedStep:
    """What one step takes: seconds by phase, and bytes by collective."""

    seconds: defaultdict[str, float]
    sent: Counter[Traffic]


@contextlib.contextmanager
def _measured(meter: PhaseMeter, steps: list[RehearsedStep]) -> Iterator[None]:
    meter.enter("forward")
    meter.seconds.clear()
    traffic.clear()
    yield
    meter.enter("forward")
    steps.append(RehearsedStep(meter.seconds.copy(), Counter(traffic)))


def _export(model: PackedModel, options: TrainedModelOptions, meter: PhaseMeter) -> None:
    """Gather every tensor as saving does."""
    if options.lora_rank > 0:
        return
    meter.enter("export")
    reshard_model(model)
    stored = HFWeights(model.inner, bf16=options.bf16)
    for group in stored.groups:
        stored.read(group, _nothing)


def _vocabulary(options: TrainedModelOptions) -> int:
    """How many tokens all models know."""
    return min(model.skeleton.config.get_text_config().vocab_size for model in job_models(options))


def _random_tokens(options: TrainedModelOptions, trained: Sequence[np.ndarray]) -> TokenDataset:
    """Samples of random tokens, each as long as its `trained`, which says what is learnt."""
    offsets = np.cumsum([0, *map(len, trained)], dtype=np.int64)
    ids = np.random.default_rng(0).integers(0, _vocabulary(options), offsets[-1], dtype=np.int32)
    return TokenDataset(ids, np.concatenate(trained), offsets, np.arange(len(trained)))


def _rows(options: TrainedModelOptions) -> tuple[RowShape, RowShape]:
    """The longest samples, and samples that fill rows of micro-batches limited by tokens."""
    work = supposed(options)
    if not (packs_by_tokens(options) and options.train_max_tokens_per_gpu):
        return work.rows, work.rows
    step = -(-work.tokens // options.data_parts(options.policy_processes))
    return work.rows, work.rows.filling(min(step, options.row_tokens(options.train_max_tokens_per_gpu)))


def _take_every_step(optimizer: Optimizer) -> None:
    """Even if gradients are not finite: what is added up here are copies, which may overflow."""
    take = optimizer.step

    def step(number: int, *, finite: bool = True) -> OptimizerStep:
        for gradient in optimizer.gradients().values():
            local(gradient).fill_(1e-6)
        return take(number)

    optimizer.step = step  # type: ignore[method-assign, assignment]


# ---- supervised jobs


class RehearsedTask(SupervisedTask):
    """Random tokens in place of a task's data."""

    caches = False

    def __init__(self, options: SupervisedOptions, tokenizer: Any):
        self.micro_batch_limit, self.scorers = MicroBatchLimit(), dict[str, FrozenScorer]()
        self.options, self.tokenizer, self.evaluation, self.evaluation_report = options, tokenizer, None, None
        samples, length = STEPS * options.train_batch_size, options.max_len
        if length < 2:
            raise UserError(f"--max_len {length}: a sample has a prompt and an answer, at least 2 tokens")
        longest, filling = (self._trained(rows.longest) for rows in _rows(options))
        first = options.train_batch_size * self.sequences_a_sample
        self.store: Any = _random_tokens(options, [filling] * first + [longest] * ((STEPS - 1) * first))
        if isinstance(self, PairTask):
            nothing = np.zeros(samples, dtype=np.int32)
            self.store = PairDataset(self.store, nothing, margins=nothing.astype(np.float32))
        elif isinstance(self, KTOTask):
            self.store = LabelledDataset(self.store, np.arange(samples) % 2 == 0, length)
            self.partners = {id(self.store): np.arange(samples)}
        elif isinstance(self, PRMTask):
            self.store = StepDataset(self.store, np.zeros(int(self.store.trained.sum()), dtype=np.int64), soft=False)
        self.report = DataReport("random", "random tokens")

    def _trained(self, length: int) -> np.ndarray:
        if isinstance(self, PRMTask):
            return (np.arange(length) + 1) % min(STEP_TOKENS, length) == 0
        return np.arange(length) > 0

    def data_lines(self) -> list[str]:
        return []


def _play_supervised(
    options: SupervisedOptions, device: Device, world: World, meter: PhaseMeter
) -> list[RehearsedStep]:
    changes: dict[str, Any] = {"max_epochs": 1, "max_steps": -1, "load_checkpoint": False, "eval_dataset": None}
    task = type("Rehearsed", (RehearsedTask, TASKS[options.verb]), {})
    run = build_run(dataclasses.replace(options, **changes), task, device, world)
    stop, steps = StopRequest(), list[RehearsedStep]()
    meter.around(run.task, "prepare", "scoring")
    meter.around(run.task, "loss", "forward", "backward")
    meter.around(run.optimizer, "step", "optimizer")
    _take_every_step(run.optimizer)
    for number in range(STEPS):
        with _measured(meter, steps):
            first = number * options.train_batch_size
            run.accumulate_gradients(list(range(first, first + options.train_batch_size)), stop)
            run.optimizer.step(number)
    _export(run.model, options, meter)
    return steps


# ---- RL jobs


class PlayedGroup(Group):
    """A role of which only this rank's part works; of the others' parts, log-probs and values are zeros."""

    def __init__(self, role: Any, processes: Processes, rank: int):
        self.role, self.processes = role, processes
        ranks = list(processes.ranks)
        self.part = processes.parts[ranks.index(rank)] if rank in ranks else None

    def reinit_process_group(self) -> bool:
        raise OutOfMemory("a pass did not fit")

    def call(self, method: str, parts: Sequence[Any] | None = None, **shared: Any) -> list[Any]:
        given = () if parts is None or self.part is None else (parts[self.part],)
        own = None if self.part is None else getattr(self.role, method)(*given, **shared)
        if parts is None or method == "update":
            return [own or {}] * self.size
        like = own[0] if own else torch.zeros(0)
        zeros = [[like.new_zeros(n, *like.shape[1:]) for found in part for n in found.trained] for part in parts]
        return [own if place == self.part else values for place, values in enumerate(zeros)]


def _play_rl(options: RLOptions, device: Device, world: World, meter: PhaseMeter) -> list[RehearsedStep]:
    # Rewards that are no models take no memory of the device.
    nothing: dict[str, Any] = dict.fromkeys(("reward_func", "remote_rm_url", "reward_verifier"))
    options = dataclasses.replace(options, **nothing)
    options, _ = with_planned_micro_batches(options, device, world, lambda: supposed(options))
    stop = StopRequest()
    host = RoleHost(options, make_units_in_processes(options, world.size), mesh_of, device, world, stop)
    for unit in list(host.units):
        host.build(unit=unit)
    placed = host.processes()
    groups = {name: PlayedGroup(host.roles.get(name), found, world.rank) for name, found in placed.items()}
    for name in ("actor", "critic"):
        if (trainer := host.roles.get(name)) is not None:
            trainer.schedule(steps=STEPS)
            meter.around(trainer, "share", "forward", "backward")
            meter.around(trainer.optimizer, "step", "optimizer")
            _take_every_step(trainer.optimizer)
    longest, filling = _rows(options)
    experiences = [_random_experience(options, rows) for rows in dict.fromkeys((filling, longest))]
    text = None
    if options.pretrain_data:
        row = np.arange(longest.longest) > 0
        text = TextMixture(_random_tokens(options, [row] * (STEPS * options.train_batch_size)), options)
    batcher = MicroBatcher(options, larger_scoring=device.is_accelerator, text=text)
    teaching = None
    if options.is_taught:
        teaching = Teaching(options, batcher, None)
        teaching.use(groups["actor"], groups.get("teacher"))
        meter.around(teaching, "states", "scoring")
    policy = host.roles["actor"].model if "actor" in host.roles else None
    meter.enter("rollout")
    kept = _engine(policy, options, device, groups["rollouts"].size) if policy is not None else None
    for experience in experiences:
        meter.enter("scoring")
        meter.seconds.clear()
        traffic.clear()
        _score(experience, options, device, groups, batcher, teaching)
        meter.enter("scoring")
        scored = RehearsedStep(meter.seconds.copy(), Counter(traffic))
        for name in ("advantages_N", "returns_N"):
            setattr(experience, name, torch.randn(len(experience.sampled_N)))
    steps: list[RehearsedStep] = []
    for number in range(STEPS):
        experience = experiences[0 if number == 0 else -1]
        mini_batches = all_mini_batches(experience, options, 0)
        samples = mini_batches[number % len(mini_batches)]
        with _measured(meter, steps):
            if "critic" in groups:
                parts, totals = batcher.critic_update(groups["critic"], experience, samples)
                batcher.send(groups["critic"], "update", parts, totals=totals, step=number)
            teacher_ND = None if teaching is None else teaching.states(experience, samples)
            parts, totals = batcher.policy_update(groups["actor"], experience, samples, number, teacher_ND)
            settings = {"totals": totals, "step": number, "kl_coefficient": options.init_kl_coef}
            batcher.send(groups["actor"], "update", parts, **settings)
    # Scoring is done once an iteration; a step has its share of it.
    for step in steps:
        step.seconds["scoring"] += scored.seconds["scoring"] / options.updates_per_iteration
        step.sent.update({key: size // options.updates_per_iteration for key, size in scored.sent.items()})
    del kept
    if policy is not None:
        _export(policy, options, meter)
    host.close()
    return steps


def _random_experience(options: RLOptions, work: RowShape) -> Experience:
    """An iteration's experience with prompts and answers of these lengths."""
    random, vocabulary = np.random.default_rng(0), _vocabulary(options)
    rollouts = []
    for prompt in range(options.rollout_batch_size):
        ids = random.integers(0, vocabulary, work.prompt).tolist()
        for sample in range(options.n_samples_per_prompt):
            answer = random.integers(0, vocabulary, work.answer).tolist()
            rollouts.append(Trajectory(prompt, sample, ids, answer, [-1.0] * work.answer, "length"))
    experience = Experience.of([r.prompt for r in rollouts], rollouts)
    experience.old_N = experience.sampled_N
    return experience


def _engine(policy: Policy, options: RLOptions, device: Device, parts: int) -> Any:
    """Allocate the built-in engine's memory and run one prefill; returns what of it outlives the rollout."""
    rows = supposed(options).rows
    prompts = -(-options.prompts_under_way // parts)
    slots = min(options.rollout_slots, prompts * options.n_samples_per_prompt)

    def allocated(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device.torch).fill_(1)

    with gathered(policy), scoring(policy):
        memory, free = EngineMemory(policy, options.rollout_kv_tokens), free_memory(device.torch)
        states = slots * memory.state_bytes
        size = memory.keys_and_values(slots, rows.longest, max(0, free - states))
        cache, of_prompts = allocated(size + states), allocated(states)
        read = RowShape(rows.prompt, 1).examples(max(1, min(memory.max_num_batched_tokens, prompts * rows.prompt)))
        policy(TokenBatch.of(*read).to(device.torch))
        del of_prompts
        # Of the logits, while tokens are sampled.
        allocated(sampling_bytes(slots, policy.config.get_text_config().vocab_size, options))
    return cache if size + states <= free - size - states else None


def _score(
    experience: Experience,
    options: RLOptions,
    device: Device,
    groups: dict[str, PlayedGroup],
    batcher: MicroBatcher,
    teaching: Teaching | None,
) -> None:
    """The scoring passes of an iteration, in the loop's order."""
    if (scorer := groups.get("reward")) is not None and scorer.role is not None:
        samples, length = range(len(experience))[scorer.part :: scorer.size], supposed(options).rows.longest
        for reward, _ in scorer.role.rewards:
            ids, places = np.zeros(length, dtype=np.int64), np.arange(length)
            ends = (places + 1) % min(STEP_TOKENS, length) == 0
            reward.run(reward.model, [ids] * len(samples), [ends] * len(samples))
    there = {"reference": "reference" in groups, "teacher": options.is_taught and not options.teaches_vocabulary}
    leaves_kl = options.leaves_kl_to_update(accelerator=device.is_accelerator)
    exact = not (options.bf16 or options.weight_only_int8 or options.uses_vllm)
    if not exact and options.scores_old_policy(**there, leaves_kl=leaves_kl):
        batcher.fill(experience, "old_N", groups["actor"], "log_probs")
    if "reference" in groups:
        batcher.fill(experience, "reference_N", groups["reference"], "log_probs")
    if teaching is not None:
        teaching.score(experience)
    if "critic" in groups:
        batcher.fill(experience, "values_N", groups["critic"], "values")
        if options.bootstrap_truncated:
            batcher.fill(experience, "after_N", groups["critic"], "values", experience.cut_off_S, after=True)


# ---- the report


def _too_large(what: str, plan: Plan | None) -> str:
    return f"does not fit: {what}; {'try a smaller model or more processes' if plan is None else plan.flags_that_fit()}"


@dataclasses.dataclass
class Rehearsal:
    """What was measured, and the plan of the same job."""

    called: str
    options: TrainedModelOptions
    device: Device
    meter: PhaseMeter
    steps: list[RehearsedStep]
    plan: Plan | None

    def __post_init__(self) -> None:
        # The first step allocates the optimizer's state, and compiles kernels.
        self.step = min(self.steps[1:], key=lambda step: sum(step.seconds.values()))
        size = self.options.processes
        self.machines, self.split = _machines(self.device, size), Split.of(self.options, self.options.policy_processes)
        self.hardware = self.machines.hardware
        self.arithmetic = sum(self.step.seconds.values())

    @property
    def planned(self) -> int | None:
        return None if self.plan is None else self.plan.memory.peak - self.plan.hardware.program

    @property
    def planned_seconds(self) -> float | None:
        """Of a step, as the plan has them: without rollouts."""
        if self.plan is None or self.plan.time is None:
            return None
        updates = self.options.updates_per_iteration if isinstance(self.options, RLOptions) else 1
        return sum(self.plan.time.phases.get(phase, 0.0) for phase in ("scoring", "update")) / updates

    def sending(self) -> tuple[float, float]:
        """Seconds of collectives inside layers, and of others: weights and gradients, which travel while layers
        work."""
        inside = others = 0.0
        in_layers = {(self.split.tensor, 1)}
        if (
            self.split.parts > self.split.context
        ):  # otherwise these processes share weights, too, and which is which is not known
            in_layers.add((self.split.context, self.split.tensor))
        for key, sent in self.step.sent.items():
            twice = 2 if key.collective == "all-reduce" else 1  # reduce-scatter and all-gather
            seconds = self.machines.gathering(twice * sent, key.processes, key.stride)
            if (key.processes, key.stride) in in_layers:
                inside += seconds
            else:
                others += seconds
        return inside, others

    @property
    def seconds(self) -> float:
        inside, others = self.sending()
        return self.arithmetic + inside + max(0.0, others - self.arithmetic)

    @property
    def share(self) -> float:
        """Of the memory."""
        return (self.meter.peak + self.meter.before) / self.hardware.memory

    def check(self) -> None:
        """UserError: it does not fit."""
        if self.share > 1:
            raise UserError(_too_large(f"{self.share:.0%} of the memory", self.plan))

    def lines(self) -> list[str]:
        options, peaks, step, hardware = self.options, self.meter.peaks, self.step, self.hardware
        where = f"{self.device.name}, {hardware.memory / GIB:.1f} GiB"
        rank = f"rank {options.rehearse_rank} of {options.processes}"
        text = [f"{self.called}, {rank} ({self.split}, --zero_stage {options.zero_stage}) on {where}"]
        text += ["", "peak memory by phase, GiB"]
        text += [_row(phase, peaks[phase] / GIB, ".2f") for phase in PHASES if phase in peaks]
        planned = "" if self.planned is None else f"   (trimtab plan: {self.planned / GIB:.2f})"
        text += [_row("peak", self.meter.peak / GIB, ".2f") + planned, "", "seconds of arithmetic a step"]
        text += [_row(phase, step.seconds[phase], ".3g") for phase in PHASES if step.seconds[phase] > 1e-4]
        text += [_row("whole", self.arithmetic, ".3g")]
        if step.sent:
            text += ["", "GB a step by collective"]
        for key, sent in step.sent.most_common():
            text.append(
                _row(f"{key.collective} over {key.processes} processes, stride {key.stride}", sent / 1e9, ".3g")
            )
        if hardware.link is not None and step.sent:
            inside, others = self.sending()
            text += ["", f"time of a step {self.seconds:.3g} s: arithmetic {self.arithmetic:.3g}, sums inside layers"]
            text[-1] += f" {inside:.3g}, weights and gradients {others:.3g} while layers work"
            text[-1] += f" (trimtab plan: {self.planned_seconds:.3g})" if self.planned_seconds else ""
            text.append(
                f"  assumed: {LINK_SHARE:.0%} of {hardware.link / 1e9:g} GB/s within machines of {self.machines.gpus} "
                f"and of {NETWORK / 1e9:g} GB/s between them; layers are not compiled"
            )
        if self.share > 1:
            return text
        tight = f"; more than {FILL:.0%} leaves little for fragments" if self.share > FILL else ""
        return [*text, "", f"fits: {self.share:.0%} of the memory{tight}"]


def _row(name: str, value: float, style: str) -> str:
    return f"  {name:<46}{value:9{style}}"
