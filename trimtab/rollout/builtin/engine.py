"""The built-in rollout engine: generates with the trainer's own weights, in place.

What it keeps between calls is memory, what lies in it of earlier texts, and captured graphs; how requests are answered
is in session.py. On an accelerator the steps between two looks are captured (graphs.py), and so is the reading of
prompts (read_graphs.py), with kernels of their own (kernels/). Where that cannot be, and on a CPU, the same passes run
as they come.
"""

from collections.abc import Collection

import torch

from trimtab.distributed.memory import free_memory
from trimtab.distributed.peers import Peers
from trimtab.errors import UserError
from trimtab.models.policy import Policy
from trimtab.models.rotary import generated_context
from trimtab.rollout.answering import AT_WORK, AnsweringEngine
from trimtab.rollout.builtin.captured import CapturedGraphs
from trimtab.rollout.builtin.int8 import Int8Layers
from trimtab.rollout.builtin.memory import PAGE_SIZE, KVMemory
from trimtab.rollout.builtin.recognition import recognised
from trimtab.rollout.builtin.runner import Runner
from trimtab.rollout.builtin.session import BuiltinSession
from trimtab.rollout.builtin.weights import is_split, state_of
from trimtab.rollout.types import Sampling

READ_TOKENS = 8192  # prompt tokens in one pass


def require_packed(policy: Policy) -> None:
    """A UserError, in one line, for a model that this engine cannot run."""
    if policy.path != "packed":
        raise UserError(
            f"the built-in engine cannot run {type(policy.inner).__name__}: {policy.not_packed}. SFT, DPO and reward "
            "models train it in padded rows; RL and generation take --rollout_engine vllm, if vLLM runs this model"
        )


class BuiltinEngine(AnsweringEngine):
    """While it answers, and until a stream is taken to its end or closed, the policy is the engine's. Of a policy that
    is split over processes, every process must ask, if for no prompts at all."""

    def __init__(
        self,
        policy: Policy,
        tokenizer=None,
        *,
        slots: int = 256,
        kv_tokens: int | None = None,
        page_size: int = PAGE_SIZE,
        read_tokens: int = READ_TOKENS,
        weight_only_int8: bool = False,
        keep_prefixes: bool = False,
        eager: bool = False,
        tensor: Peers | None = None,
    ):
        """`slots`: samples that run at once; `kv_tokens`: memory for keys and values (planned from what is free if
        not given); `read_tokens`: prompt tokens in one pass; `weight_only_int8`: see int8.py; `keep_prefixes`: a call
        goes on from what earlier ones have read and drawn with these weights, and not only a session from its own. In
        the last bits that is not the same as reading anew. `eager`: no graphs are captured. `tensor`: the processes
        that the policy's layers are cut over. All of them ask the same and draw the same tokens; what a process decides
        by itself, they decide together."""
        require_packed(policy)
        self.policy, self.tokenizer, self.slots = policy, tokenizer, slots
        self.read_tokens, self.keep_prefixes = read_tokens, keep_prefixes
        self.tensor = tensor or Peers()
        cut = self.tensor.size > 1
        with policy.at_work():
            shape, arguments = Runner.measure(policy)
            # Fused layers read whole weights. Of cut ones the modules know how to add up.
            self.fused = None if cut else recognised(policy, shape, arguments, page_size)
        self.memory = KVMemory(shape, page_size, kv_tokens, self.tensor)
        # Every layer of a cut model waits for other processes, which nobody has tried in a captured graph.
        self.captured = CapturedGraphs(policy, slots, possible=not eager and not cut)
        self.exact = shape.dtype == torch.float32 and not weight_only_int8
        self.version = 0
        self.context = generated_context(policy.config)
        self.tokens_read = 0
        """Of all prompts so far, those that were not kept; and what was read back after making room for others."""
        self._int8 = Int8Layers(policy) if weight_only_int8 else None
        self._session: BuiltinSession | None = None
        self._read_with: tuple | None = None  # the weights that what is kept was read with

    def session(self, sampling: Sampling) -> BuiltinSession:
        """Requests one by one; see engine.py above this folder. Until it is closed, the policy is the engine's. Of a
        policy that is split over processes, every process must open one, and close it."""
        return self._begun(sampling, True)

    def session_of_call(self, sampling: Sampling) -> BuiltinSession:
        return self._begun(sampling, self.keep_prefixes)

    def _begun(self, sampling: Sampling, keeping: bool) -> BuiltinSession:
        if self._session is not None:
            raise UserError(AT_WORK)
        if sampling.stop_strings and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer; give the engine one")
        session = self._session = BuiltinSession(self, sampling, keeping)
        try:
            session.finally_do(self._ended)
            session.enter(self.policy.at_work())
            self._drop_what_is_stale()
            if self._int8 is not None:
                session.enter(self._int8)
        except BaseException:
            session.close()
            raise
        return session

    @property
    def _keeps(self) -> bool:
        """Between calls. Weights that are gathered for a call are written past torch's counts of what was written."""
        return self.keep_prefixes and not is_split(self.policy)

    def _ended(self) -> None:
        self._session = None
        if not self._keeps:
            self.memory.forget()

    def _drop_what_is_stale(self) -> None:
        """Nobody need say that the weights have changed."""
        if self._keeps:
            weights = state_of(self.policy)
            if weights != self._read_with:
                self.memory.forget()
            self._read_with = weights

    def weights_changed(self, version: int) -> None:
        """The weights are another version now: nothing of the last one's is read any more."""
        if self._session is not None:
            raise UserError("the engine is at work; its weights may change when all its answers are taken")
        self.version = version
        self.memory.forget()

    def abort(self, prompts: Collection[int] | None = None) -> None:
        """Stop the answers to these prompts, or all: the stream gives what they have so far, finished by "abort"."""
        if self._session is not None:
            self._session.abort(prompts)

    def sleep(self) -> None:
        """Give the engine's memory back; the next call takes what it needs again."""
        if self._session is not None:
            raise UserError("the engine is at work and cannot sleep; take all its answers first, or close their stream")
        self.captured.release()
        self.memory.release()
        if self._int8 is not None:
            self._int8.release()

    def rest(self) -> None:
        """Between the calls of a training loop: sleep if what is held is more than what is still free."""
        if self.memory.held > free_memory(self.policy.device):
            self.sleep()

    def wake(self) -> None:
        """Nothing to prepare: the next call takes the memory it needs."""

    def close(self) -> None:
        """Nothing is held but memory, which goes with the engine."""
