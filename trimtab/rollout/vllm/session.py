"""Requests at work in a vLLM engine. Every sample is a request of its own there, with its own seed; that they share a
prompt is left to vLLM's prefix cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trimtab.distributed.watch import pulse
from trimtab.errors import RunFailed, UserError
from trimtab.rollout.answering import OpenSession
from trimtab.rollout.episode import Task
from trimtab.rollout.seeds import request_seed
from trimtab.rollout.stopping import check_setting, stop_string_end
from trimtab.rollout.types import Alternatives, Draft, Finish, Rollout, Sampling, drafts_of
from trimtab.rollout.vllm.sampling import Parameters

if TYPE_CHECKING:
    from trimtab.rollout.vllm.engine import VLLMEngine

TOKENS_BETWEEN_LOOKS = 8  # for stop strings, which are looked for in text


@dataclass
class Sample:
    request: int
    number: int
    prompt_ids: list[int]
    draft: Draft  # what it goes on from
    sampling: Sampling
    output: Any = None  # vLLM's own, of all that was drawn since
    looked: int = 0  # tokens in which there is no stop string

    @property
    def ids(self) -> list[int]:
        return self.draft.ids + ([] if self.output is None else list(self.output.token_ids))

    @property
    def length(self) -> int:
        """Tokens that are there with their log-probs: vLLM adds to both while it works."""
        if self.output is None:
            return len(self.draft.ids)
        return len(self.draft.ids) + min(len(self.output.token_ids), len(self.output.logprobs.end_indices))

    def log_probs(self, count: int) -> np.ndarray:
        if self.output is None:
            return self.draft.log_probs
        flat, new = self.output.logprobs, count - len(self.draft.ids)
        drawn = np.array([flat.logprobs[start] for start in flat.start_indices[:new]], dtype=np.float32)
        return np.concatenate([self.draft.log_probs, drawn])

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


class VLLMSession(OpenSession):
    def __init__(self, engine: "VLLMEngine", sampling: Sampling, ended: Callable[[], None]):
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
        drafts: Sequence[Draft] | None = None,
        task: Task | None = None,
        sampling: Sampling | None = None,
    ) -> int:
        """vLLM draws by a seed and how many tokens it has drawn itself: with every draft, from another stream."""
        parameters = self._parameters
        if sampling is None:
            sampling = self.sampling
        else:
            check_setting(sampling, self.engine.vocabulary, self.engine.tokenizer)
            parameters = Parameters(sampling, self.engine.vocabulary)
        number, limit = self.requests, sampling.max_new_tokens if limit is None else limit
        self.engine.check_request(number, prompt_ids, limit)
        assert not (drafts and sampling.top_log_probs), "a draft has no alternatives"
        seed = request_seed(sampling.seed, number) if seed is None else seed
        for draft in drafts_of(drafts, sampling.n, number, limit):
            name, own, done = self.engine.name_request(), request_seed(seed, draft.sample), len(draft.ids)
            self.engine.llm.add_request(
                name,
                {"prompt_token_ids": prompt_ids + draft.ids},
                parameters.of(request_seed(own, done) if done else own, limit, done),
                lora_request=self.engine.adapter,
            )
            self._running[name] = Sample(number, draft.sample, list(prompt_ids), draft, sampling, looked=done)
        self.requests += 1
        return number

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def advance(self, steps: int | None = None) -> list[Rollout]:
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

    def drafts(self) -> dict[int, list[Draft]]:
        found: dict[int, list[Draft]] = {}
        for sample in list(self._running.values()):
            # Nobody has looked for stop strings in what comes after.
            count = sample.looked if sample.sampling.stop_strings else sample.length
            found.setdefault(sample.request, []).append(Draft.of(self._rollout(sample, "abort", count)))
        return found

    def close(self) -> None:
        if self._running:
            self.engine.llm.abort_request(list(self._running))
            self._running.clear()
        self._ended()

    # ---- what was drawn

    def _take(self, name: str, sample: Sample, output: Any) -> Rollout | None:
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
        if not ended and len(ids) - sample.looked < TOKENS_BETWEEN_LOOKS:
            return None
        decode = self.engine.tokenizer.decode
        end = stop_string_end(ids, sample.looked, sampling.min_new_tokens, sampling.stop_strings, decode)
        sample.looked = len(ids)
        return end

    def _take_aborted(self) -> list[Rollout]:
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

    def _rollout(self, sample: Sample, finish: Finish, count: int | None = None) -> Rollout:
        ids = sample.ids[:count]
        log_probs = sample.log_probs(len(ids))
        if not np.isfinite(log_probs).all():
            raise UserError(
                f"the model's logits are not finite for prompt {sample.request}, sample {sample.number}; its weights "
                "are probably broken"
            )
        rollout = Rollout(sample.request, sample.number, sample.prompt_ids, ids, log_probs, finish)
        rollout.plain_log_probs = log_probs.copy() if sample.sampling.plain_log_probs else None
        rollout.versions = sample.draft.versions_of(len(ids), self.engine.version)
        rollout.alternatives = sample.alternatives(len(ids))
        return rollout
