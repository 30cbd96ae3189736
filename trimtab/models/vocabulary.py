"""Which words of the vocabulary a process has, where an embedding or an output head is cut."""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Words:
    first: int
    count: int
    widths: list[int]  # how many each process has, in rank order
    group: ProcessGroup

    @classmethod
    def of(cls, weight: Tensor) -> "Words | None":
        """By the rows of a matrix [vocabulary, D] that lie here. None: all of them do."""
        if not isinstance(weight, DTensor):
            return None
        assert weight.device_mesh.ndim == 1, "read while it is gathered but for the tensor dimension"
        words, parts, part = weight.shape[0], weight.device_mesh.size(), weight.device_mesh.get_local_rank()
        most = -(-words // parts)
        widths = [min(most, words - place * most) for place in range(parts)]
        assert weight.to_local().shape[0] == widths[part]
        return cls(part * most, widths[part], widths, weight.device_mesh.get_group())

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Among the words that are here, the place of each; and whether it is one of them (else the place is any)."""
        places = ids - self.first
        return places.clamp(0, self.count - 1), (places >= 0) & (places < self.count)
