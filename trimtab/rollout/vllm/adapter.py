"""LoRA adapters for vLLM, which reads them from a folder as PEFT writes it. The folder lies in memory."""

import json
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab.errors import UserError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM has kernels for


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
        """For vLLM: what lies there now, under a new number."""
        from vllm.lora.request import LoRARequest

        self.version += 1
        return LoRARequest(f"version-{self.version}", self.version, str(self.path))

    def remove(self) -> None:
        self._folder.cleanup()
