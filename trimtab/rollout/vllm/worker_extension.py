"""The worker extension of vLLM engines, which receives weights, and LoRA adapters as the folders that vLLM reads.

vLLM mixes `WorkerExtension` into the worker of every process. Weights go through its layerwise reload, under the names
of Hugging Face files. On a CPU the LM head multiplies by a packed copy, which that reload does not renew if the head is
tied to the embedding, and experts are packed when they are loaded, but not when they are reloaded. So both are packed
again here.
"""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trimtab.distributed.weight_transfer import TransferChannel, describe_receiver, join_as_receiver
from trimtab.errors import UserError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for


def rank_that_fits(rank: int) -> int:
    found = next((size for size in RANKS if size >= rank), None)
    if found is None:
        raise UserError(f"--lora_rank {rank}: vLLM takes at most {RANKS[-1]}; use --vllm_sync_lora merged")
    return found


def write_adapter(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file(
        {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    (folder / "adapter_config.json").write_text(json.dumps(config))


class AdapterFolder:
    """A folder in memory with the current adapter, as PEFT writes it."""

    def __init__(self) -> None:
        in_memory = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(
            prefix="trimtab-adapter-", dir=in_memory if in_memory.is_dir() else None, ignore_cleanup_errors=True
        )
        self.path = Path(self._folder.name)
        self.version = 0

    def write(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        write_adapter(self.path, tensors, config)

    def request(self) -> Any:
        """vLLM's request for the current adapter, under a new number."""
        from vllm.lora.request import LoRARequest

        self.version += 1
        return LoRARequest(f"version-{self.version}", self.version, str(self.path))

    def remove(self) -> None:
        self._folder.cleanup()


class WorkerExtension:
    model_runner: Any
    vllm_config: Any
    device: Any
    rank: int
    _link: TransferChannel | None = None

    def attempt(self, method: str, *arguments: Any) -> str | None:
        """Call a method that involves other processes; returns why it failed. Nothing is raised: vLLM would report the
        first failure, and take the results of other processes for those of the next call."""
        try:
            getattr(self, method)(*arguments)
        except (RuntimeError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def receiver_address(self) -> dict[str, Any]:
        return describe_receiver(self.device)

    def connect_receiver(self, plan: list[dict[str, Any]]) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        self._link = join_as_receiver(plan, self.device)

    def reload_from(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=tensors)
        if self.device.type == "cpu":
            pack_heads(self.model_runner.model)
            pack_experts(self.model_runner.model)

    def receive_weights(self) -> None:
        assert self._link is not None, "no link was joined"
        with self._link.receiving() as tensors:  # an interrupted reload would break the next one
            self.reload_from(tensors)

    def receive_adapter(self, folder: str) -> None:
        """The first process writes the folder for all."""
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


def pack_experts(model: nn.Module) -> None:
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if hasattr(module, "w13_weight") and (kernel := getattr(method, "moe_kernel", None)) is not None:
            kernel.fused_experts.process_weights_after_loading(module)
