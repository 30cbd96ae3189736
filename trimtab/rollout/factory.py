"""The one place that chooses a rollout engine; everything else knows what every engine can do (engine.py)."""

import os
from typing import TYPE_CHECKING, Any

from trimtab.distributed.peers import Peers
from trimtab.models.handover import Handover
from trimtab.models.policy import Policy
from trimtab.rollout.builtin.engine import MAX_NUM_BATCHED_TOKENS, BuiltinEngine
from trimtab.rollout.builtin.engine import require_packed as require_packed
from trimtab.rollout.builtin.kv_cache import PAGE_SIZE, KVCacheManager
from trimtab.rollout.builtin.model_runner import ModelRunner
from trimtab.rollout.engine import Engine

if TYPE_CHECKING:
    from trimtab.rollout.vllm.engine import VLLMEngine


def build_engine(
    policy: Policy,
    tokenizer: Any = None,
    *,
    max_num_seqs: int = 256,
    kv_tokens: int | None = None,
    weight_only_int8: bool = False,
    prefix_caching: bool = False,
    eager: bool = False,
    tensor: Peers | None = None,
) -> Engine:
    """The built-in engine for this policy. `max_num_seqs`: sequences that run at once; `kv_tokens`: KV cache size,
    planned from free memory if not given; `weight_only_int8`: linear layers multiply by int8 copies; `prefix_caching`:
    the prefix cache outlives a call. A resumed run starts with an empty one, so its numbers differ in the last bits.
    `eager`: no captured graphs. `tensor`: the processes of the policy's tensor-parallel group, which all make the same
    calls."""
    return BuiltinEngine(
        policy,
        tokenizer,
        max_num_seqs=max_num_seqs,
        kv_tokens=kv_tokens,
        weight_only_int8=weight_only_int8,
        prefix_caching=prefix_caching,
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

    max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
    """Prompt tokens in one pass."""

    def __init__(self, policy: Policy, kv_tokens: int | None):
        self._memory = KVCacheManager(ModelRunner.measure(policy)[0], PAGE_SIZE, kv_tokens)

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token."""
        return self._memory.shape.token_bytes

    def keys_and_values(self, samples: int, longest: int, free: int) -> int:
        """Bytes for so many samples at once of at most `longest` tokens, where so many bytes are free."""
        return self._memory.pages(samples, longest, free) * self._memory.page_bytes
