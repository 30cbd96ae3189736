"""How the models of a job are split over its processes.

The processes of a model form a mesh (distributed/mesh.py): copies x parts of the parameters x parts of a row x parts of
every layer. --ring_attn_size and --ds_tensor_parallel_size are the last two; what is left holds samples of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trimtab.config.groups import LoadOptions, ProcessOptions
from trimtab.config.option import option
from trimtab.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ShardingOptions(ProcessOptions):
    """Processes and sharding"""

    adam_offload: bool = False
    """Keep the optimiser's state in main memory and step there."""
    grad_accum_dtype: str | None = option(None, choices=("fp32", "bf16"))
    """Type of accumulated gradients: fp32 or bf16; unset: fp32."""
    overlap_comm: bool = option(False, needs=("zero_stage", 3))
    """Gather each layer's weights while the layer before it works, which takes the memory of one more layer. Gradients
    are always exchanged while the backward pass goes on."""
    zpg: int = option(1, at_least=1)
    """Between forward and backward pass keep weights split over this many neighbours only, which gather them faster
    (ZeRO++'s second partition); masters, gradients and optimiser stay split over all."""
    shard_size: int | None = option(None, at_least=1)
    """Split the model over this many processes, and let the others hold copies of it; unset: over all. Processes of
    --ds_tensor_parallel_size are not counted."""
    ds_tensor_parallel_size: int = option(1, at_least=1)
    """Split every layer's arithmetic, the embedding and the LM head over this many neighbouring processes."""
    ring_attn_size: int = option(1, at_least=1)
    """Split every row of tokens over this many neighbouring processes; attention gathers their keys and values. A row
    then holds this many times the tokens of --train_max_tokens_per_gpu."""
    ring_head_stride: int = option(1, at_least=1)
    """Heads of keys that attention gathers at a time, for --ring_attn_size: fewer need less memory. Nothing else
    changes. It must divide the heads of keys that a process has."""
    deepcompile: bool = False
    """The same as --compile on."""

    def settle(self, changes: dict[str, Any]) -> Iterable[str]:
        if self.deepcompile:
            changes["compile"] = "on"
        return ()

    @property
    def policy_processes(self) -> int:
        """How many of them hold what is trained."""
        return self.processes

    def mesh_sizes(self, processes: int, *, learns: bool = True) -> dict[str, int]:
        """The dimensions of a mesh of so many processes, but for the one that follows from the others. A UserError: it
        has no such dimensions. `learns`: its model is trained; one that only scores may be in fewer processes than
        --shard_size names, and keeps nothing for a backward pass."""
        context, tensor = self.ring_attn_size, self.ds_tensor_parallel_size
        together = context * tensor
        if processes % together:
            asked = [f"--{name} {getattr(self, name)}" for name in ("ring_attn_size", "ds_tensor_parallel_size")]
            used = " x ".join(flag for flag, size in zip(asked, (context, tensor)) if size > 1)
            raise UserError(
                f"{used}: {_counted(processes)} cannot be shared out so; start a multiple "
                f"of {together} (--nproc {together})"
            )
        splitting = processes // tensor  # over how many parameters can be split
        replicate = self._copies(splitting, learns=learns)
        neighbours = self.zpg if learns else 1
        split = splitting // replicate
        if neighbours > 1 and (split % neighbours or neighbours == split):
            raise UserError(
                f"--zpg {neighbours} must divide the {_counted(split)} that parameters are split over, and be fewer"
            )
        return {"replicate": replicate, "context": context, "tensor": tensor, "neighbours": neighbours}

    def _copies(self, splitting: int, *, learns: bool) -> int:
        context = self.ring_attn_size
        if self.shard_size is None:
            return splitting // context if self.zero_stage == 0 else 1
        if self.zero_stage == 0:
            raise UserError(
                "--shard_size splits what --zero_stage 0 does not: leave it out, or use --zero_stage 2 or 3"
            )
        size = self.shard_size if learns else min(self.shard_size, splitting)
        if splitting % size or size % context:
            of = "" if context == 1 else f" and be a multiple of --ring_attn_size {context}"
            raise UserError(f"--shard_size {self.shard_size} must divide {_counted(splitting)}{of}")
        return splitting // size

    def splits_frozen(self, *, offload: bool) -> bool:
        """Whether a model without gradients is split over several processes: where the trained one's weights are, where
        layers are cut, or where it is kept off the device."""
        return self.zero_stage == 3 or self.ds_tensor_parallel_size > 1 or offload

    def row_tokens(self, tokens: int) -> int:
        """Tokens of a row of which every process that works on it has so many."""
        return tokens * self.ring_attn_size

    def data_parts(self, processes: int) -> int:
        return max(1, processes // (self.ring_attn_size * self.ds_tensor_parallel_size))

    def check(self) -> Iterable[str]:
        if self.zpg > 1 and self.zero_stage < 3:
            raise UserError(f"--zpg keeps split what --zero_stage {self.zero_stage} does not split: use --zero_stage 3")
        if self.zpg > 1 and self.ds_tensor_parallel_size > 1:
            raise UserError("--zpg and --ds_tensor_parallel_size do not work together: leave one of them out")
        if self.policy_processes > 1:
            self.mesh_sizes(self.policy_processes)
        split = self.processes > 1 or self.ring_attn_size > 1 or self.ds_tensor_parallel_size > 1
        if split and isinstance(self, LoadOptions) and self.load_in_4bit:
            raise UserError("--load_in_4bit: 4-bit weights cannot be split; train in one process")
        for flag in ("ring_attn_size", "ds_tensor_parallel_size"):
            if getattr(self, flag) > 1 and isinstance(self, LoadOptions) and self.attn_implementation is not None:
                raise UserError(
                    f"--{flag} works with the attention of this project alone: leave --attn_implementation out"
                )
        if self.ring_attn_size == 1:
            yield from self.idle(["ring_head_stride"], "without --ring_attn_size")


def _counted(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"
