"""How a model is split over processes, as the options say it: the sizes of its mesh."""

from dataclasses import dataclass

from trimtab.config.sharding import ShardingOptions

CHANGED = (  # the options that a plan chooses where nobody has
    "zero_stage",
    "shard_size",
    "ds_tensor_parallel_size",
    "ring_attn_size",
    "gradient_checkpointing",
    "offload_activations",
    "adam_offload",
)


@dataclass(frozen=True)
class Split:
    processes: int
    replicate: int
    context: int
    tensor: int
    neighbours: int
    """That keep weights between a forward and its backward pass (--zpg)."""
    zero_stage: int

    @classmethod
    def of(cls, options: ShardingOptions, processes: int) -> "Split":
        """A UserError: the options cannot be met by so many."""
        sizes = options.mesh_sizes(processes)
        return cls(processes, **sizes, zero_stage=options.zero_stage)

    @property
    def data(self) -> int:
        """Processes, or groups of them, with samples of their own."""
        return self.processes // (self.context * self.tensor)

    @property
    def parts(self) -> int:
        """Over how many processes parameters, gradients and moments are split."""
        return self.processes // (self.replicate * self.tensor)

    def in_words(self) -> str:
        names = {"replicate": self.replicate, "parameters": self.parts, "context": self.context, "tensor": self.tensor}
        if self.context > 1:
            names["parameters"] = self.parts // self.context
        return " x ".join(f"{name} {size}" for name, size in names.items() if size > 1) or "one process"
