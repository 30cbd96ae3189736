"""vLLM behind what every engine can do: tokens in, tokens and their log-probs out.

It holds weights of its own, loaded from a folder first. After that they come from a policy in the same process, which
it asks for them (`weights`), or over links from trainers elsewhere (`join` and `receive`; worker.py takes them in). It
is not exact: kernels and order of sums differ from the trainer's.
"""

import itertools
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from trimtab.distributed.alone import be_alone
from trimtab.errors import RunFailed, UserError
from trimtab.models.handover import Handover
from trimtab.models.hugging_face import from_pretrained
from trimtab.rollout.answering import AnsweringEngine
from trimtab.rollout.types import Sampling
from trimtab.rollout.vllm.adapter import AdapterFolder, rank_that_fits
from trimtab.rollout.vllm.environment import load_vllm
from trimtab.rollout.vllm.session import VLLMSession

RECEIVER = "trimtab.rollout.vllm.worker.WeightReceiver"
VALUE_ERROR = "Value error, "  # how pydantic's lines begin


@dataclass(frozen=True)
class EngineSettings:
    bf16: bool = False
    longest: int | None = None  # tokens of a prompt and its answer; the model's context, where that is less or None
    slots: int = 256  # samples that run at once
    memory_share: float = 0.9  # of the device
    prefix_caching: bool = True
    eager: bool = False  # no captured graphs, nothing compiled
    tensor_parallel: int = 1
    sleeps: bool = False  # memory can be given back
    adapter_rank: int = 0  # above 0: adapters come, and the model under them stays as it was loaded
    seed: int = 0
    trust_remote_code: bool = False


class VLLMEngine(AnsweringEngine):
    exact = False

    def __init__(self, folder: str, tokenizer: Any, settings: EngineSettings, weights: Handover | None = None):
        """`weights`: of a policy in this process."""
        load_vllm()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        if weights is not None and settings.tensor_parallel > 1:
            raise UserError("--vllm_tensor_parallel_size above 1: such an engine has processes of its own; add --ray")
        self.tokenizer, self.settings, self.weights = tokenizer, settings, weights
        self.version = 0
        self.adapter: Any = None
        self._adapters = AdapterFolder() if settings.adapter_rank else None
        self._asleep = False
        self._session: VLLMSession | None = None
        self._names = map(str, itertools.count())
        if settings.tensor_parallel == 1:
            be_alone()
        more: dict[str, Any] = {}
        if settings.adapter_rank:
            more = {
                "enable_lora": True,
                "max_lora_rank": rank_that_fits(settings.adapter_rank),
                "max_loras": 1,
                "max_cpu_loras": 2,
            }
        if settings.tensor_parallel > 1:
            more |= {"distributed_executor_backend": "mp", "tensor_parallel_size": settings.tensor_parallel}
        if current_platform.is_cpu():
            # It reads a prompt in pieces when a pass is full, and then cannot set a seeded stream back on a CPU.
            more |= {"enable_chunked_prefill": False}
        try:
            self.llm = LLMEngine.from_engine_args(
                EngineArgs(
                    model=os.path.expanduser(folder),
                    dtype="bfloat16" if settings.bf16 else "float32",
                    max_model_len=longest_that_fits(folder, settings.longest),
                    trust_remote_code=settings.trust_remote_code,
                    max_num_seqs=settings.slots,
                    gpu_memory_utilization=settings.memory_share,
                    enable_prefix_caching=settings.prefix_caching,
                    enforce_eager=settings.eager,
                    enable_sleep_mode=settings.sleeps,
                    seed=settings.seed,
                    logprobs_mode="processed_logprobs",
                    skip_tokenizer_init=True,
                    generation_config="vllm",  # what a run asks for, and nothing from the folder
                    disable_log_stats=True,
                    use_tqdm_on_load=False,
                    worker_extension_cls=RECEIVER,
                    **more,
                )
            )
        except Exception as error:  # no memory, or a kind of model that it cannot take: it raises anything
            raise UserError(f"--rollout_engine vllm: the engine cannot be started: {why_refused(error)}") from error
        self.vocabulary: int = self.llm.model_config.get_vocab_size()
        self.context: int = self.llm.model_config.max_model_len

    # ---- answers

    def session(self, sampling: Sampling) -> VLLMSession:
        self._check_idle("take all its answers first, or close their stream")
        if sampling.stop_strings and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer; give the engine one")
        self.wake()
        self._session = VLLMSession(self, sampling, self._ended)
        return self._session

    def _ended(self) -> None:
        self._session = None

    def abort(self, prompts: Collection[int] | None = None) -> None:
        if self._session is not None:
            self._session.abort(prompts)

    def name_request(self) -> str:
        return next(self._names)

    def check_request(self, number: int, prompt_ids: list[int], limit: int) -> None:
        if not prompt_ids:
            raise UserError(f"prompt {number} is empty; at least one token is needed")
        if max(prompt_ids) >= self.vocabulary or min(prompt_ids) < 0:
            raise UserError(f"prompt {number} has a token outside the model's vocabulary of {self.vocabulary}")
        if limit < 1:
            raise UserError(f"the limit of prompt {number} is {limit}; at least 1 new token is needed")
        if len(prompt_ids) + limit > self.context:
            raise UserError(
                f"prompt {number} has {len(prompt_ids)} tokens and {limit} may follow, but the engine's context is "
                f"{self.context}; shorten the prompt or lower max_new_tokens"
            )

    # ---- weights

    def weights_changed(self, version: int) -> None:
        """Take the policy's weights as they are now, where it is in this process."""
        self._check_idle("its weights may change when all its answers are taken")
        self.wake()
        if self.weights is not None and self._adapters is not None:
            self._adapters.write(dict(self.weights.tensors()), self.weights.adapter_config())
            self._take_adapter()
        elif self.weights is not None:
            self.llm.collective_rpc("take_weights", args=(self.weights.tensors(),))
        self._changed(version)

    def seats(self) -> list[dict[str, Any]]:
        """Where its processes are, each of which takes part in receiving weights."""
        return self.llm.collective_rpc("take_seat")

    def join(self, plan: list[dict[str, Any]]) -> None:
        """Open the links over which weights come; see distributed/link.py for plans."""
        self._check_idle("its links may change when all its answers are taken")
        self._attempt("join_link", plan)

    def receive(self, version: int) -> None:
        """Weights that are being sent at this moment."""
        self._check_idle("its weights may change when all its answers are taken")
        self.wake()
        if self._adapters is not None:
            self._attempt("receive_adapter", str(self._adapters.path))
            self._take_adapter()
        else:
            self._attempt("receive_weights")
        self._changed(version)

    def _attempt(self, method: str, *arguments: Any) -> None:
        """In all its processes."""
        told = self.llm.collective_rpc("attempt", args=(method, *arguments))
        if failures := [failure for failure in told if failure is not None]:
            raise RuntimeError(failures[0])

    def _take_adapter(self) -> None:
        """The one in the folder, under a number of its own; the last one goes."""
        assert self._adapters is not None
        if self.adapter is not None:
            self.llm.remove_lora(self.adapter.lora_int_id)
        self.adapter = self._adapters.request()
        self.llm.add_lora(self.adapter)

    def _changed(self, version: int) -> None:
        if not self.llm.reset_prefix_cache():
            raise RunFailed("the vLLM engine did not forget what it read with its last weights: blocks are in use")
        self.version = version

    # ---- memory

    def sleep(self) -> None:
        """Give memory back; the weights wait in main memory."""
        self._check_idle("it cannot sleep before all its answers are taken")
        if self.settings.sleeps and not self._asleep:
            self.llm.reset_prefix_cache()
            self.llm.sleep(1)
            self._asleep = True

    def rest(self) -> None:
        self.sleep()

    def wake(self) -> None:
        if self._asleep:
            self.llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        """Let go of its processes and its folder."""
        if self._adapters is not None:
            self._adapters.remove()
        self.llm.engine_core.shutdown()

    def _check_idle(self, cure: str) -> None:
        if self._session is not None:
            raise UserError(f"the engine is at work: {cure}")


def longest_that_fits(folder: str, asked: int | None) -> int | None:
    """Prompts may be shorter than their limit: what is asked for may be more than the model's context."""
    from transformers import AutoConfig

    context = getattr(from_pretrained(AutoConfig, folder).get_text_config(), "max_position_embeddings", None)
    return asked if asked is None or context is None else min(asked, context)


def why_refused(error: Exception) -> str:
    """The line of an error that says it: those of pydantic begin with how many there are."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = next((line for line in lines if line.startswith(VALUE_ERROR)), lines[0])
    return said.removeprefix(VALUE_ERROR).partition(" [type=")[0]
