"""Our sampling settings in vLLM's words; what it cannot do, or would do otherwise, is refused.

Its log-probs are those of the distribution that a token was drawn from. With a temperature alone that is what the
trainer computes; with --top_p, --top_k or a penalty it is the distribution that was left.
"""

from typing import Any

from trimtab.errors import UserError
from trimtab.rollout.types import Sampling

MOST_BIAS = 100.0  # beyond it vLLM clips without a word


def check_sampling(sampling: Sampling) -> None:
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

    def __init__(self, sampling: Sampling, vocabulary: int):
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
