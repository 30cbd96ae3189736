"""The one place that chooses a rollout engine; everything else knows what every engine can do (engine.py)."""

import os
from typing import TYPE_CHECKING, Any

from trimtab.distributed.peers import Peers
from trimtab.models.handover import Handover
from trimtab.models.policy import Policy
from trimtab.rollout.builtin.engine import READ_TOKENS, BuiltinEngine
from trimtab.rollout.builtin.engine import require_packed as require_packed
from trimtab.rollout.builtin.kv_cache import PAGE_SIZE, KVMemory
from trimtab.rollout.builtin.model_runner import Runner
from trimtab.rollout.engine import Engine

if TYPE_CHECKING:
    from trimtab.rollout.vllm.engine import VLLMEngine


def build_engine(
    policy: Policy,
    tokenizer: Any = None,
    *,
    slots: int = 256,
    kv_tokens: int | None = None,
    weight_only_int8: bool = False,
    keep_prefixes: bool = False,
    eager: bool = False,
    tensor: Peers | None = None,
) -> Engine:
    """The engine that answers with this policy. `slots`: samples that run at once; `kv_tokens`: memory for keys and
    values, planned from what is free if not given; `weight_only_int8`: linear layers multiply by int8 copies;
    `keep_prefixes`: what was read and drawn in one call is not read again in the next. A run that was resumed has kept
    nothing, so in the last bits its numbers would be others. `eager`: no graphs are captured. `tensor`: the processes
    that the policy's layers are cut over, which all ask the same."""
    return BuiltinEngine(
        policy,
        tokenizer,
        slots=slots,
        kv_tokens=kv_tokens,
        weight_only_int8=weight_only_int8,
        keep_prefixes=keep_prefixes,
        eager=eager,
        tensor=tensor,
    )


def build_vllm_engine(folder: str, tokenizer: Any, weights: Handover | None = None, **settings: Any) -> "VLLMEngine":
    """A vLLM engine with the model of a folder; `settings` are those of rollout/vllm/engine.EngineSettings.

    `weights`: of a policy in this process, which it takes from there; else they come over links.
    """
    from trimtab.rollout.vllm.engine import EngineSettings, VLLMEngine

    return VLLMEngine(folder, tokenizer, EngineSettings(**settings), weights)


def engine_environment() -> dict[str, str]:
    """What the environment of a process must hold in which a vLLM engine will be built; what this one's says wins."""
    from trimtab.rollout.vllm.engine import environment

    return {name: os.environ.get(name, value) for name, value in environment().items()}


class EngineMemory:
    """What that engine will take of a device, known before it is built."""

    read_tokens = READ_TOKENS
    """Prompt tokens in one pass."""

    def __init__(self, policy: Policy, kv_tokens: int | None):
        self._memory = KVMemory(Runner.measure(policy)[0], PAGE_SIZE, kv_tokens)

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token."""
        return self._memory.shape.token_bytes

    def keys_and_values(self, samples: int, longest: int, free: int) -> int:
        """Bytes for so many samples at once of at most `longest` tokens, where so many bytes are free."""
        return self._memory.pages(samples, longest, free) * self._memory.page_bytes
