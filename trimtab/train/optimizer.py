"""AdamW and Muon with fp32 master weights: schedule, clipping, offload, and a running average of the weights.

The model's parameters are the working weights that training and sampling read. When they are bf16, the optimizer keeps
fp32 master weights and fp32 gradient accumulators and writes the result back in place, because an update of 1e-6 would
vanish in a bf16 parameter. When they are fp32 already, master and parameter are the same tensor.

With --optimizer muon the matrices of the decoder layers have Muon, and all else AdamW: embeddings, heads, norms, biases
and experts in one stack. An adapter's A and B are matrices of their own.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trimtab.algos.muon import orthogonalised, rate_scale
from trimtab.config.training_options import UpdateOptions
from trimtab.distributed.fsdp import accumulate_in, blocks_of, local, part_of, sum_over_parts, whole
from trimtab.errors import UserError
from trimtab.models.activation_memory import layers_of
from trimtab.train.checkpoint import HostTensors, ShardedTensors


@dataclass
class OptimizerStep:
    grad_norm: float
    applied: bool  # False: the gradient was not finite and no weight changed


class Optimizer:
    def __init__(
        self,
        model: nn.Module,
        options: UpdateOptions,
        total_steps: int | None = None,
        *,
        learning_rate: float,
        fused: bool,
        gradient_dtype: torch.dtype = torch.float32,
        offload: bool = False,
    ):
        self.working = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: _master(p, offload) for name, p in self.working.items()}
        self.gradient_dtype = gradient_dtype
        self.max_norm = options.max_norm
        self.learning_rate = learning_rate
        self.accumulated: dict[str, Tensor] = {}
        self._away: list[tuple[Tensor, torch.device]] = []  # offloaded tensors and their devices
        for name, parameter in self.working.items():
            # A sharded model sums its gradients itself, in this dtype.
            if parameter.dtype != gradient_dtype and not isinstance(parameter, DTensor):
                accumulate_in(gradient_dtype, parameter, self.accumulated, name)
        self.matrices = hidden_matrices(model) if options.optimizer == "muon" else []
        self.adam = torch.optim.AdamW(
            self._groups(options.l2),
            lr=learning_rate,
            betas=tuple(options.adam_betas),
            eps=options.adam_eps,
            fused=fused,
        )
        self.muon: Muon | None = None
        if self.matrices:
            masters, device = [self.masters[name] for name in self.matrices], self.working[self.matrices[0]].device
            self.muon = Muon(masters, learning_rate, options.l2, options.muon_momentum, options.muon_scale, device)
        self.factor: Callable[[int], float] | None = None
        if total_steps is not None:
            self.schedule(options, total_steps)

    def schedule(self, options: UpdateOptions, total_steps: int) -> None:
        """Set the learning-rate schedule over `total_steps`."""
        self.factor = schedule(options, total_steps, self.adam)

    def rate(self, step: int) -> float:
        assert self.factor is not None, "the schedule needs to know how many steps there are"
        return self.learning_rate * self.factor(step)

    def step(self, step: int, *, finite: bool = True) -> OptimizerStep:
        """Clip, apply and clear the accumulated gradients at the learning rate of this step. `finite` False: the loss
        was not finite, so the gradients are dropped."""
        return self.apply(self.rate(step), finite=finite)

    def apply(self, learning_rate: float, *, divisor: float = 1.0, finite: bool = True) -> OptimizerStep:
        """Like `step`, at an explicit learning rate; `divisor`: the gradients are divided by it first."""
        if not finite:
            self.clear_gradients()
            return OptimizerStep(math.nan, applied=False)
        for name, master in self.masters.items():
            master.grad = self._gradient(name, master)
        gradients = [m.grad for m in self.masters.values() if m.grad is not None]
        if divisor != 1.0 and gradients:
            torch._foreach_div_([local(g) for g in gradients], divisor)
        grad_norm = total_norm(gradients)
        applied = math.isfinite(grad_norm)
        if applied:
            if self.max_norm > 0 and gradients:
                torch._foreach_mul_([local(g) for g in gradients], min(1.0, self.max_norm / (grad_norm + 1e-6)))
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
                optimizer.step()
            self._write_back({name: m for name, m in self.masters.items() if m.grad is not None})
        self.clear_gradients()
        return OptimizerStep(grad_norm, applied)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.adam] if self.muon is None else [self.adam, self.muon]

    def _moments(self, master: Tensor) -> dict[str, Tensor]:
        """What AdamW or Muon keeps for a parameter."""
        return next((found for optimizer in self.optimizers if (found := optimizer.state.get(master))), {})

    @property
    def state_bytes(self) -> int:
        """Size of a checkpoint: weights and two moments in fp32, of Muon's matrices one."""
        moments = {name: 1 for name in self.matrices}
        return sum(4 * (1 + moments.get(name, 2)) * master.numel() for name, master in self.masters.items())

    def gradients(self) -> dict[str, Tensor]:
        """Gradients accumulated since the last step, by parameter name."""
        found = {name: self.accumulated.get(name, parameter.grad) for name, parameter in self.working.items()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def restore_gradients(self, gradients: dict[str, Tensor]) -> None:
        """Continue the accumulation from these gradients."""
        for name, gradient in gradients.items():
            parameter = self.working[name]
            own = gradient.to(parameter.device)
            if parameter.dtype == self.gradient_dtype:
                parameter.grad = own
            else:
                self.accumulated[name] = own

    def take_gradients(self) -> list[Tensor]:
        """Return the accumulated gradients and clear them."""
        found = list(self.gradients().values())
        self.clear_gradients()
        return found

    def clear_gradients(self) -> None:
        self.accumulated.clear()
        for tensors in (self.working, self.masters):
            for tensor in tensors.values():
                tensor.grad = None

    def sleep(self) -> None:
        """Offload moments and separate master weights to main memory until `wake`."""
        assert not self._away, "it sleeps already"
        for name, master in self.masters.items():
            found = [value for value in self._moments(master).values() if value.ndim]
            self._away += [(tensor, local(tensor).device) for tensor in found]
            if master is not self.working[name]:
                self._away.append((master, local(master).device))
        self._move([(tensor, torch.device("cpu")) for tensor, _ in self._away])

    def wake(self) -> None:
        """Move the offloaded tensors back to their devices."""
        self._move(self._away)
        self._away = []

    @staticmethod
    def _move(places: list[tuple[Tensor, torch.device]]) -> None:
        with torch.no_grad():
            for tensor, device in places:
                if isinstance(tensor, DTensor):
                    tensor._local_tensor = tensor._local_tensor.to(device)
                else:
                    tensor.data = tensor.data.to(device)

    def state(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint: fp32 weights and moments, by parameter name."""
        tensors = {}
        for name, master in self.masters.items():
            tensors[f"weight/{name}"] = master.detach()
            for key, value in self._moments(master).items():
                tensors[f"{key}/{name}"] = value
        return tensors

    def restore(self, saved: ShardedTensors | HostTensors) -> None:
        with torch.no_grad():
            for name, master in self.masters.items():
                saved.read_into(f"weight/{name}", master)
                if self.muon is not None and f"{MOMENTUM}/{name}" in saved:
                    self.muon.state[master] = {MOMENTUM: torch.zeros_like(master)}
                    saved.read_into(f"{MOMENTUM}/{name}", self.muon.state[master][MOMENTUM])
                if f"exp_avg/{name}" not in saved:
                    continue
                moments = {key: torch.zeros_like(master) for key in ("exp_avg", "exp_avg_sq")}
                for key, moment in moments.items():
                    saved.read_into(f"{key}/{name}", moment)
                # Fused Adam needs its step counter on the weights' device, the plain one on the host.
                fused = self.adam.param_groups[0]["fused"]
                counter = saved.whole(f"step/{name}")
                self.adam.state[master] = moments | {"step": counter.to(master.device) if fused else counter}
        self._write_back(self.masters)

    def _groups(self, weight_decay: float) -> list[dict]:
        """Adam's parameter groups: no weight decay for vectors (biases and norms)."""
        own = [master for name, master in self.masters.items() if name not in self.matrices]
        decayed, others = ([m for m in own if (m.ndim >= 2) is matrix] for matrix in (True, False))
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return [g for g in groups if g["params"]] or groups[:1]

    def _gradient(self, name: str, master: Tensor) -> Tensor | None:
        gradient = self.accumulated.get(name, self.working[name].grad)
        return None if gradient is None else gradient.to(master.device, torch.float32)

    def _write_back(self, masters: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, master in masters.items():
                if master is not self.working[name]:
                    self.working[name].copy_(master)


# ---- Muon


MOMENTUM = "momentum_buffer"


def hidden_matrices(model: nn.Module) -> list[str]:
    """Names of the trained weights of the decoder layers that are matrices. Stacked biases and the states of recurrent
    layers, such as Mamba's A_log, have two dimensions too, and are no `.weight`."""
    inside = {id(parameter) for layer in layers_of(model) for parameter in layer.parameters()}
    weights = [(name, p) for name, p in model.named_parameters() if name.endswith(".weight") and id(p) in inside]
    found = [name for name, p in weights if p.requires_grad and p.ndim == 2]
    if not found:
        raise UserError(f"--optimizer muon: {type(model).__name__} trains no matrix of a decoder layer; use adamw")
    return found


class Muon(torch.optim.Optimizer):
    """Muon (algos/muon.py) of matrices that may be shards. The processes of a sharded matrix take turns: each gathers
    all updates, makes its share of them orthogonal, and all receive the results."""

    def __init__(
        self, matrices: list[Tensor], lr: float, weight_decay: float, momentum: float, scale: str, device: torch.device
    ):
        """`device`: where products are computed, also if masters are offloaded."""
        super().__init__([{"params": matrices}], {"lr": lr})
        self.weight_decay, self.momentum, self.scale, self.device = weight_decay, momentum, scale, device

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            split_alike: dict[Any, list[Tensor]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    how = (matrix.device_mesh, matrix.placements) if isinstance(matrix, DTensor) else None
                    split_alike.setdefault(how, []).append(matrix)
            for alike in split_alike.values():
                part, parts = part_of(alike[0])
                for first in range(0, len(alike), parts):
                    self._step(alike[first : first + parts], part, group["lr"])

    def _step(self, turn: list[Tensor], part: int, rate: float) -> None:
        """Update as many matrices as there are parts; this process computes the one of number `part`."""
        own = None
        for number, matrix in enumerate(turn):
            gradient, average = local(matrix.grad), self.state[matrix].get(MOMENTUM)
            if average is None:
                average = self.state[matrix][MOMENTUM] = torch.zeros_like(matrix)
            local(average).lerp_(gradient, 1 - self.momentum)
            gradient.lerp_(local(average), self.momentum)  # the gradient is not used again
            update = whole(matrix.grad.bfloat16())
            own = update if number == part else own
        result = None
        if own is not None:
            result = orthogonalised(own.to(self._device(turn[0]))).to(own.device)
            result = result.contiguous()  # of a tall matrix it is a transpose, and sums go by the order in memory
        for number, matrix in enumerate(turn):
            is_own = number == part and result is not None
            found = result if is_own else torch.zeros(matrix.shape, dtype=torch.bfloat16, device=local(matrix).device)
            found, scale = sum_over_parts(found, matrix), rate_scale(self.scale, *matrix.shape)
            held = local(matrix)
            held.mul_(1 - rate * self.weight_decay)
            for block in blocks_of(matrix):
                held[block.held].add_(found[block.slices], alpha=-rate * scale)

    def _device(self, matrix: Tensor) -> torch.device:
        # FSDP2's offloaded shards are on the CPU; their mesh knows the accelerator.
        return torch.device(matrix.device_mesh.device_type) if isinstance(matrix, DTensor) else self.device


def total_norm(gradients: list[Tensor]) -> float:
    """Global norm of all gradients, over all shards. All processes must call it."""
    if not gradients:
        return 0.0
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return float(torch.nn.utils.get_total_norm(gradients))
    split_alike: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        how = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        split_alike.setdefault(how, []).append(gradient)
    squares = [sum_over_parts(_sum_of_squares(alike), alike[0]) for alike in split_alike.values()]
    return float(torch.stack(squares).sum().sqrt())


def _sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Sum of squares over this process's shards."""
    norms = torch.stack([local(g).norm() if local(g).numel() else local(g).new_zeros(()) for g in gradients])
    return norms.square().sum()


def _master(parameter: Tensor, offload: bool) -> Tensor:
    device = torch.device("cpu") if offload else parameter.device
    if parameter.dtype == torch.float32 and parameter.device == device:
        return parameter
    return parameter.detach().to(device, torch.float32, copy=True).requires_grad_()


def warmup_steps(options: UpdateOptions, total_steps: int) -> int:
    """Number of warm-up steps: none if the run has fewer than 1 / lr_warmup_ratio steps."""
    steps = total_steps * options.lr_warmup_ratio
    return math.ceil(steps) if steps >= 1 and options.lr_scheduler != "constant" else 0


def schedule(options: UpdateOptions, total_steps: int, adam: torch.optim.Optimizer) -> Callable[[int], float]:
    """Factor of the learning rate as a pure function of the step, so that no checkpoint has to hold it: (k + 1) / W
    in step k < W of the warm-up, then Hugging Face's schedule of that name. Theirs begins the warm-up at 0, and an
    update at rate 0 changes no weight."""
    from transformers import get_scheduler

    warmup = warmup_steps(options, total_steps)
    extra = {"cosine_with_min_lr": {"min_lr_rate": options.min_lr_ratio}, "polynomial": {"lr_end": 0.0}}
    after = get_scheduler(
        options.lr_scheduler,
        adam,
        num_warmup_steps=warmup,
        num_training_steps=total_steps,
        scheduler_specific_kwargs=extra.get(options.lr_scheduler, {}),
    ).lr_lambdas[0]
    return lambda step: (step + 1) / warmup if step < warmup else after(step)


# ---- average of the weights


class WeightAverage:
    """Exponential moving average of the master weights."""

    def __init__(self, optimizer: Optimizer, decay: float):
        self.optimizer, self.decay = optimizer, decay
        self.averages = {name: master.detach().clone() for name, master in optimizer.masters.items()}

    @torch.no_grad()
    def update(self) -> None:
        for name, master in self.optimizer.masters.items():
            self.averages[name].lerp_(master.detach(), 1 - self.decay)

    def state(self) -> dict[str, Tensor]:
        return {f"average/{name}": tensor for name, tensor in self.averages.items()}

    def restore(self, saved: ShardedTensors | HostTensors) -> None:
        for name, tensor in self.averages.items():
            saved.read_into(f"average/{name}", tensor)

    @contextlib.contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """Replace the model's weights by the averages inside the context."""
        working = self.optimizer.working
        kept = {name: parameter.detach().clone() for name, parameter in working.items()}
        for name, parameter in working.items():
            parameter.copy_(self.averages[name])
        try:
            yield
        finally:
            for name, parameter in working.items():
                parameter.copy_(kept[name])
