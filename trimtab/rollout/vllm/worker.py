"""What our side adds to every process of a vLLM engine: it takes weights in, from this process or over a link.

vLLM mixes the class into its worker. Weights go through its layerwise reload, which takes them under the names of
Hugging Face files. One thing that does not renew: on a CPU the LM head multiplies by a packed copy, and where the head
is tied to the embedding nothing packs it again.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trimtab.distributed.link import Link, join_as_receiver, seat
from trimtab.rollout.vllm.adapter import write_adapter


class WeightReceiver:
    model_runner: Any
    vllm_config: Any
    device: Any
    rank: int
    _link: Link | None = None

    def attempt(self, method: str, *arguments: Any) -> str | None:
        """Call a method that has to do with other processes; why it failed. That is not raised: vLLM would tell of the
        first process that did, and take the answers of the others for those of the next call."""
        try:
            getattr(self, method)(*arguments)
        except (RuntimeError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def take_seat(self) -> dict[str, Any]:
        return seat(self.device)

    def join_link(self, plan: list[dict[str, Any]]) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        self._link = join_as_receiver(plan, self.device)

    def take_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=tensors)
        if self.device.type == "cpu":
            pack_heads(self.model_runner.model)

    def receive_weights(self) -> None:
        assert self._link is not None, "no link was joined"
        with self._link.receiving() as tensors:  # a reload that stopped half-way would spoil the next one
            self.take_weights(tensors)

    def receive_adapter(self, folder: str) -> None:
        """The first process writes for all."""
        assert self._link is not None, "no link was joined"
        with self._link.receiving() as tensors:
            received = dict(tensors)
        if self.rank == 0:
            write_adapter(Path(folder), received, self._link.about["adapter_config"])


def pack_heads(model: nn.Module) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
