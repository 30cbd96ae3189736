"""Roles with models: the trained actor and critic, and the frozen reference, teacher and reward models.

One call of `update` is one optimizer step. Every process of a group runs the same method with its own slices; figures
and gradients are summed over all.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from torch import Tensor

from trimtab.config.rl_jobs import RLOptions
from trimtab.data.batches import TokenBatch
from trimtab.distributed.device import Device
from trimtab.distributed.fsdp import local, reshard_model
from trimtab.distributed.launcher import Role
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.weight_transfer import TransferPlan, TransferSender
from trimtab.errors import OutOfMemory
from trimtab.files import reason
from trimtab.models.compile import AtWork, compile_problem, disable_compile
from trimtab.models.load import Loaded, fake_policy
from trimtab.models.lora import adapters_off
from trimtab.models.packed import PackedModel, scoring
from trimtab.models.policy import Policy, TeacherHead
from trimtab.models.reward import Critic
from trimtab.models.routing import check_routes, counted_experts
from trimtab.models.save import save_model
from trimtab.models.weight_export import WeightExport
from trimtab.rewards.models import ModelReward, ProcessReward
from trimtab.rewards.types import RewardFailed, RewardRequest, RewardResult, rewards_info
from trimtab.rollout.sampling import stop_tokens
from trimtab.train.checkpoint import HostTensors, ShardedTensors, all_finite, write_sharded
from trimtab.train.layer_compilation import compile_if_worthwhile, compile_report, first_problem
from trimtab.train.optimizer import Optimizer, WeightAverage
from trimtab.train.proof import (
    ADAPTER_B,
    TrialUpdate,
    check_export,
    in_chunks,
    shift_tensors,
)
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.micro_batches import AnswerBatch, Slice, TextBatch, batches_of, make_slice
from trimtab.train.rl.objective import policy_loss_term, text_loss_term, value_loss_term
from trimtab.train.run_directory import names_fingerprint
from trimtab.train.task import FrozenScorer
from trimtab.train.update import InsufficientMemory, LossTerm, Totals, accumulate, memory_guard, undo_step

RoleModel = tuple[PackedModel, Device, Sequence[AtWork]]
"""A model, its device, and the context managers in which it runs without gradients."""


class ModelRole(Role):
    """A role with models, whose layers may be compiled."""

    called: str  # name of its model in messages
    options: RLOptions
    mesh: Mesh

    def models(self) -> list[RoleModel]:
        """The models whose layers this role may compile."""
        raise NotImplementedError

    def learning(self, tokens: float) -> dict[str, Any]:
        """Arguments of `compile_if_worthwhile` for a model trained on this many tokens; {} for a frozen one."""
        return {}

    def compile_layers(self, *, learnt: float, scored: float, decided: bool | None) -> dict[str, Any]:
        """Compile the models' layers if that pays off; arguments as in `compile_if_worthwhile`."""
        fixed = {"scored": scored, "decided": decided, **self.learning(learnt)}
        settled = [
            compile_if_worthwhile(self.options, model, device, self.mesh, scores=scores, **fixed)
            for model, device, scores in self.models()
        ]
        return compile_report(settled, self.called)

    def layers_problem(self) -> str:
        problems = [problem for model, *_ in self.models() if (problem := compile_problem(model))]
        return first_problem(self.mesh, problems[0] if problems else "")

    def leave_layers_plain(self) -> None:
        for model, *_ in self.models():
            disable_compile(model)


class Trainer(ModelRole):
    """A trained model with its optimizer, in every process of a data-parallel or sharded group."""

    def __init__(
        self, options: RLOptions, model: PackedModel, optimizer: Optimizer, tokenizer: Any, device: Device, mesh: Mesh
    ):
        self.options, self.model, self.optimizer = options, model, optimizer
        self.tokenizer, self.device, self.mesh = tokenizer, device, mesh
        self._kept_states: dict[str, HostTensors] = {}

    def schedule(self, *, steps: int) -> None:
        """Set the learning-rate schedule to this many optimizer steps."""
        self.optimizer.schedule(self.options, steps)

    def models(self) -> list[RoleModel]:
        return [(self.model, self.device, self.scores())]

    def scores(self) -> list[AtWork]:
        """Context managers in which the model runs without gradients."""
        return [contextlib.nullcontext]

    def learning(self, tokens: float) -> dict[str, Any]:
        return {"learnt": tokens, "gradients": self.optimizer.take_gradients}

    def sleep(self) -> None:
        """Offload optimizer state and free gradients until `wake`. The model stays on the device, because a replacement
        engine may request its weights meanwhile."""
        if not self.device.is_accelerator:
            return
        self.optimizer.clear_gradients()
        self.optimizer.sleep()
        self.device.release_memory()

    def wake(self) -> None:
        if self.device.is_accelerator:
            self.optimizer.wake()

    def memory_gib(self) -> float:
        """Peak device memory of this process."""
        return self.device.memory_gib()

    def share(self, batch: TokenBatch, totals: Totals, **settings: Any) -> LossTerm:
        raise NotImplementedError

    def update(self, slices: Sequence[Slice], *, totals: Totals, step: int, **settings: Any) -> dict[str, float]:
        """One optimizer step over all micro-batches of all processes; returns its figures."""
        count = sum(len(part.samples) for part in slices)

        def share(batch: TokenBatch) -> LossTerm:
            return self.share(batch.to(self.device.torch), totals, **settings)

        with memory_guard(undo_step(self.optimizer)):
            found = self.accumulate(batches_of(slices), count, share)
        report = self.optimizer.step(step, finite=math.isfinite(found["loss"]))
        found["learning_rate"] = self.optimizer.rate(step)
        return found | {"grad_norm": report.grad_norm, "applied": float(report.applied)}

    def accumulate(
        self, batches: Iterable[TokenBatch], count: int, share: Callable[[TokenBatch], LossTerm]
    ) -> dict[str, float]:
        """Add the gradients of these micro-batches; returns their figures over all processes."""
        with counted_experts(self.model) as load:
            figures = accumulate(self.model, self.mesh, batches, count, share)
        self.gather_gradients()
        return self.mesh.data.add_up(figures | load.figures(self.mesh.data))

    def try_update(
        self, *, experience: Experience, columns: list[str], totals: Totals, name: str | None, **settings: Any
    ) -> dict[str, Any]:
        """Run this one of proof.TRIALS on the answers, or only a pass; the state stays as it is."""

        def make(parts: list[list[int] | None]) -> tuple[list[TokenBatch], Callable[[TokenBatch], LossTerm]]:
            batches = [batch.to(self.device.torch) for batch in make_slice(experience, parts, *columns).batches()]
            for batch in batches:
                batch.weight /= self.mesh.data_size
            return batches, lambda batch: self.share(batch, totals, **settings)

        trial = TrialUpdate(
            *(self.model, self.optimizer, self.mesh, len(experience), make, self.accumulate),
            fake=self.fake_model(),
            balanced=self.options.aux_loss_coef > 0,
            bf16=self.options.bf16 or self.options.load_in_4bit,
        )
        with memory_guard():
            result, seconds = trial.run(name)
        return {"result": result and dataclasses.asdict(result), "seconds": seconds}

    def keep_state(self, *, name: str) -> None:
        """Copy the state for `differing_state`."""
        self._kept_states[name] = HostTensors(self.tensors())

    def differing_state(self, *, name: str = "", folder: Path | None = None) -> list[str]:
        """Names of the tensors that are not as they were kept, or as the checkpoint in this folder has them."""
        saved = self._kept_states.pop(name) if folder is None else ShardedTensors(folder)
        return saved.differing(self.tensors())

    def fake_model(self) -> Callable[[], PackedModel] | None:
        """Makes the model without weights, if all that it trains is trained here."""
        return None

    def gather_gradients(self) -> None:
        """Hook for parameters outside a sharded model, which reduces its gradients in the last backward pass."""

    # ---- on disk

    def write_state(self, *, folder: Path, step: int) -> str | None:
        """Write this process's part of the checkpoint. A disk error is returned, not raised, since other processes
        wait."""
        return problem_of(lambda: write_sharded(folder, self.tensors(), self.mesh, step))

    def trained_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.optimizer.working.values())

    def state_bytes(self) -> int:
        return self.optimizer.state_bytes

    def read_state(self, *, folder: Path) -> None:
        self.restore(ShardedTensors(folder))

    def is_finite(self) -> bool:
        """Whether all values in this process's part of the checkpoint are finite."""
        return all_finite(self.tensors().values())

    def carry(self) -> HostTensors:
        """A copy of this process's state in main memory, for the rebuilt role."""
        return HostTensors(self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        return self.optimizer.state()

    def restore(self, saved: ShardedTensors | HostTensors) -> None:
        self.optimizer.restore(saved)

    def save(self, *, folder: Path) -> str | None:
        """Save the model as a Hugging Face folder. A disk error is returned, not raised."""
        return problem_of(lambda: self.write_model(folder))

    def write_model(self, folder: Path) -> None:
        save_model(self.model, self.tokenizer, folder, mesh=self.mesh, bf16=self.options.bf16)


class PolicyTrainer(Trainer):
    called = "policy"
    model: Policy
    origin: Loaded | None = None  # the pretrained model as loaded
    export: WeightExport | None = None  # to engines in their own processes
    sender: TransferSender | None = None
    teacher_head: TeacherHead | None = None  # None: the teacher's head is the policy's own

    def __init__(self, options: RLOptions, *parts: Any):
        super().__init__(options, *parts)
        self.average = WeightAverage(self.optimizer, options.ema_beta) if options.enable_ema else None
        self._shown = contextlib.ExitStack()
        self._unshifted: dict[str, Tensor] = {}

    def describe(self) -> dict[str, Any]:
        """Facts for the run's manifest and sampling parameters."""
        assert self.origin is not None
        return {
            "weights": self.origin.weights,
            "notes": list(self.origin.notes),
            "path": self.model.path,
            "not_exact": self.model.not_exact,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "trainable": names_fingerprint(self.optimizer.working),
            "trainable_parameters": self.trained_parameters(),
            "stop_token_ids": stop_tokens(self.model, self.tokenizer),
            "device": self.device.described(),
        }

    def fake_model(self) -> Callable[[], PackedModel] | None:
        return None if self.options.lora_rank else partial(fake_policy, self.options)

    def shift_weights(self, *, scale: float) -> None:
        """Change some weights until `unshift_weights` or another shift: all B of adapters, or the small tensors, 1/8 of
        all weights. `scale`: of the size of their elements."""
        self.unshift_weights()
        masters = self.optimizer.masters
        sizes = dict(sorted(((name, master.numel()) for name, master in masters.items()), key=lambda found: found[1]))
        chosen = [name for name in masters if ADAPTER_B.search(name)] or in_chunks(sizes)[0]
        self._unshifted = {name: local(masters[name]).detach().clone() for name in chosen}
        shift_tensors(self.optimizer, {name: masters[name] for name in chosen}, scale)
        reshard_model(self.model)

    def unshift_weights(self) -> None:
        for name, before in self._unshifted.items():
            for tensors in (self.optimizer.masters, self.optimizer.working):
                local(tensors[name]).detach().copy_(before)
        self._unshifted = {}
        reshard_model(self.model)

    def scores(self) -> list[AtWork]:
        own = super().scores()
        if (self.options.lora_rank > 0 and self.options.init_kl_coef > 0) or self.options.teacher_is_base:
            own.append(lambda: adapters_off(self.model.model))  # the reference or the teacher
        return own

    def share(self, batch: TokenBatch, totals: Totals, **settings: Any) -> LossTerm:
        if isinstance(batch, TextBatch):
            return text_loss_term(self.model, batch, totals, self.options)
        assert isinstance(batch, AnswerBatch)
        return policy_loss_term(self.model, batch, totals, self.options, teacher_head=self.teacher_head, **settings)

    def update(self, slices: Sequence[Slice], **settings: Any) -> dict[str, float]:
        self.check_routes(slices)
        report = super().update(slices, **settings)
        if self.average is not None and report["applied"]:
            self.average.update()
        return report

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | (self.average.state() if self.average is not None else {})

    def restore(self, saved: ShardedTensors | HostTensors) -> None:
        super().restore(saved)
        if self.average is not None:
            self.average.restore(saved)

    def write_model(self, folder: Path) -> None:
        """Save the model; with --enable_ema, its averaged weights."""
        with contextlib.nullcontext() if self.average is None else self.average.in_place():
            super().write_model(folder)

    def try_export(self, *, folder: Path, ids: list[int]) -> dict[str, Any]:
        """Save the model, and compare it with what plain transformers reads."""
        batch = TokenBatch.of([(np.array(ids), np.ones(len(ids), dtype=bool))]).to(self.device.torch)
        with contextlib.nullcontext() if self.average is None else self.average.in_place():
            super().write_model(folder)
            half = self.options.bf16 or self.options.load_in_4bit
            found = check_export(folder, self.options.pretrain, self.model, batch, self.mesh, bf16=half)
            return dataclasses.asdict(found)

    def show_average(self) -> None:
        """Replace the model's weights by their average until `hide_average`."""
        assert self.average is not None
        self._shown.enter_context(self.average.in_place())

    def hide_average(self) -> None:
        self._shown.close()

    # ---- engines in their own processes: all ranks of a sharded policy gather, ranks with a link send

    def offer_link(self) -> dict[str, Any]:
        """Address to connect to, and names and shapes of the tensors to be sent."""
        assert self.sender is not None and self.export is not None
        about = {"adapter_config": self.export.adapter_config()} if self.export.adapters else {}
        return {**self.sender.offer(), "tensors": self.export.described(), "about": about}

    def join_links(self, *, plan: TransferPlan) -> None:
        assert self.sender is not None
        self.sender.open(plan)

    def send_weights(self) -> None:
        """Send weights; the engines must receive them at the same time."""
        assert self.sender is not None and self.export is not None
        self.sender.send(self.export.tensors())

    def close(self) -> None:
        if self.sender is not None:
            self.sender.close()

    def check_routes(self, slices: Sequence[Slice]) -> None:
        for part in slices:
            if part.routes_TLK is not None:
                check_routes(self.model, part.routes_TLK)

    def log_probs(self, slices: Sequence[Slice]) -> list[Tensor]:
        self.check_routes(slices)
        device, temperature = self.device.torch, self.options.temperature
        with memory_guard(), scoring(self.model):
            found = [self.model(b.to(device), temperature=temperature).log_probs_N for b in batches_of(slices)]
            return fetched(found)

    # ---- learning from a teacher, which may be the policy itself

    def hidden_states(self, slices: Sequence[Slice]) -> list[Tensor]:
        """Hidden states that predict the sampled tokens."""
        with memory_guard(), scoring(self.model):
            return states_of(self.model, slices, self.device)

    def averaged_hidden_states(self, slices: Sequence[Slice]) -> list[Tensor]:
        """The same with averaged weights, whose head is kept for the update."""
        with self._averaged():
            self.teacher_head = None  # before there are two
            self.teacher_head = TeacherHead.of(self.model).to(self.device.torch, copy=True)
            return self.hidden_states(slices)

    def averaged_log_probs(self, slices: Sequence[Slice]) -> list[Tensor]:
        with self._averaged():
            return self.log_probs(slices)

    def use_teacher_head(self, *, head: TeacherHead) -> None:
        self.teacher_head = head.to(self.device.torch)

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """--teacher_ema: averaged weights inside the context. Parameters that are still gathered would be others."""
        assert self.average is not None
        try:
            with memory_guard(), self.average.in_place():
                reshard_model(self.model)
                yield
        finally:
            reshard_model(self.model)


class CriticTrainer(Trainer):
    called = "critic"
    model: Critic

    def share(self, batch: TokenBatch, totals: Totals, **settings: Any) -> LossTerm:
        assert isinstance(batch, AnswerBatch)
        return value_loss_term(self.model, batch, totals, self.options)

    def values(self, slices: Sequence[Slice], *, after: bool = False) -> list[Tensor]:
        """Values before each sampled token, or `after` it."""
        with memory_guard(), scoring(self.model):
            return fetched([self.model(batch.to(self.device.torch), after=after) for batch in batches_of(slices)])


class ReferenceRole(ModelRole):
    def __init__(self, reference: FrozenScorer, options: RLOptions, mesh: Mesh, called: str):
        self.reference, self.options, self.mesh, self.called = reference, options, mesh, called

    def models(self) -> list[RoleModel]:
        found = self.reference
        # With LoRA the reference is the policy without adapters, whose layers the policy's role compiles.
        return [] if found.adapters_off else [(found.model, found.device, [found.at_work])]

    def log_probs(self, slices: Sequence[Slice]) -> list[Tensor]:
        with memory_guard():
            moved = (batch.to(self.reference.device.torch) for batch in batches_of(slices))
            return fetched(self.reference.log_probs(moved, self.options.temperature))

    def hidden_states(self, slices: Sequence[Slice]) -> list[Tensor]:
        with memory_guard(), self.reference.at_work() as model:
            return states_of(model, slices, self.reference.device)

    def head(self) -> TeacherHead | None:
        """The teacher's head, from the first process."""
        head = TeacherHead.of(self.reference.model)
        return head if self.mesh.is_rank_zero else None


class RewardModels(ModelRole):
    called = "reward model"

    def __init__(self, models: Sequence[tuple[ModelReward | ProcessReward, float]], options: RLOptions, mesh: Mesh):
        self.rewards, self.options, self.mesh = models, options, mesh

    def models(self) -> list[RoleModel]:
        return [(found.model, found.device, [partial(found.keeping.at_work, found.model)]) for found, _ in self.rewards]

    def describe(self) -> dict[str, Any]:
        columns = {name for model, _ in self.rewards for name in model.columns}
        texts = any(model.reads_texts for model, _ in self.rewards)
        return rewards_info(self.rewards) | {"columns": sorted(columns), "texts": texts}

    def score(self, request: RewardRequest) -> list[RewardResult] | RewardFailed | InsufficientMemory:
        """One result a model. A failure is returned, not raised, and only after all models were called: a sharded model
        must run in all processes or in none."""
        results: list[RewardResult] = []
        failures: list[RewardFailed] = []
        try:
            with memory_guard():
                for model, _ in self.rewards:
                    try:
                        results.append(model(request))
                    except RewardFailed as failure:
                        failures.append(failure)
        except OutOfMemory as shortage:
            return reward_models_too_large(shortage)
        return failures[0] if failures else results


def reward_models_too_large(shortage: OutOfMemory) -> InsufficientMemory:
    return InsufficientMemory(
        f"the reward models do not fit into memory ({shortage}); lower --micro_reward_batch_size, --generate_max_len "
        "or --prompt_max_len, or give --ref_reward_offload"
    )


def states_of(model: Policy, slices: Sequence[Slice], device: Device) -> list[Tensor]:
    """Hidden states of every micro-batch, each in main memory before the next is computed."""
    return [model(b.to(device.torch), hidden_only=True).hidden_ND.cpu() for b in batches_of(slices)]


def fetched(found: Sequence[Tensor]) -> list[Tensor]:
    """Copy results to main memory after all micro-batches, so that the device is synchronized only once."""
    return [values.cpu() for values in found]


def problem_of(write: Callable[[], None]) -> str | None:
    try:
        write()
    except (OSError, SafetensorError) as error:
        return reason(error)
    return None
