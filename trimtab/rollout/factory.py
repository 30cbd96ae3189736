"""Builds rollout engines. The only file that knows the built-in and the vLLM engine; all others use engine.py."""

import os
from typing import TYPE_CHECKING, Any

from trimtab.models.policy import Policy
from trimtab.models.weight_export import WeightExport
from trimtab.rollout.builtin.engine import MAX_NUM_BATCHED_TOKENS, BuiltinEngine
from trimtab.rollout.builtin.engine import why_slow as why_slow
from trimtab.rollout.builtin.kv_cache import PAGE_SIZE, KVCacheManager
from trimtab.rollout.builtin.model_runner import ModelRunner
from trimtab.rollout.engine import Engine

if TYPE_CHECKING:
    from trimtab.rollout.vllm.engine import VLLMEngine


def build_engine(policy: Policy, tokenizer: Any = None, **settings: Any) -> Engine:
    """The built-in engine for this policy; `settings` are those of BuiltinEngine."""
    return BuiltinEngine(policy, tokenizer, **settings)


def build_vllm_engine(
    folder: str, tokenizer: Any, weights: WeightExport | None = None, **settings: Any
) -> "VLLMEngine":
    """A vLLM engine with the model of a folder; `settings` are those of rollout/vllm/engine.EngineSettings.

    `weights`: of a policy in this process, which it copies; else they come over links.
    """
    from trimtab.rollout.vllm.engine import EngineSettings, VLLMEngine

    return VLLMEngine(folder, tokenizer, EngineSettings(**settings), weights)


def engine_environment() -> dict[str, str]:
    """Environment variables of a process that will build a vLLM engine; values of this process win."""
    from trimtab.rollout.vllm.engine import environment

    return {name: os.environ.get(name, value) for name, value in environment().items()}


class EngineMemory:
    """Memory that the built-in engine will need, known before it is built."""

    max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
    """Prompt tokens of one prefill pass."""

    def __init__(self, policy: Policy, kv_tokens: int | None):
        self._memory = KVCacheManager(ModelRunner.measure(policy)[0], PAGE_SIZE, kv_tokens)

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token."""
        return self._memory.shape.token_bytes

    @property
    def state_bytes(self) -> int:
        """States of recurrent layers of one sequence."""
        return self._memory.shape.state_bytes

    def keys_and_values(self, samples: int, longest: int, free: int) -> int:
        """Bytes of the KV cache for this many sequences of at most `longest` tokens, if `free` bytes are free."""
        return self._memory.pages(samples, longest, free) * self._memory.page_bytes
