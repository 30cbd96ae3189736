"""The output processor: appends the tokens of a decode chunk to their sequences, and finds where they finish."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from trimtab.errors import UserError
from trimtab.rollout.builtin.sampler import SamplerOutput
from trimtab.rollout.builtin.scheduler import SequenceState
from trimtab.rollout.sampling import at_stop_tokens, stop_string_end
from trimtab.rollout.trajectory import Finish, TopLogprobs, Trajectory


def append_tokens(
    samples: list[SequenceState], drawn: SamplerOutput, tokenizer: PreTrainedTokenizerBase | None
) -> list[tuple[SequenceState, Finish]]:
    """The sequences that have finished, and their finish reasons."""
    tokens, log_probs, plain = drawn.on_host(len(samples))
    steps, number = tokens.shape[1], np.arange(tokens.shape[1])
    remaining = np.array([sample.limit - sample.ids.count for sample in samples])
    stops = at_stop_tokens(tokens, [sample.sampling.stop_token_ids for sample in samples]) & (
        number < remaining[:, None]
    )
    stopped = stops.any(1)
    kept = np.where(stopped, stops.argmax(1) + 1, np.minimum(steps, remaining))
    broken = np.argwhere(np.isnan(log_probs) & (number < kept[:, None]))
    if len(broken):
        row, step = broken[0]
        raise UserError(
            f"the model's logits are not finite for prompt {samples[row].prompt.index}, sample "
            f"{samples[row].number}, token {len(samples[row].ids) + step}; its weights are probably broken"
        )
    # Copies, because the next chunk overwrites the buffers.
    rows = list(np.array(tokens, np.int32, order="C")), list(np.array(log_probs, np.float32, order="C"))
    plain = None if plain is None else np.array(plain, np.float32, order="C")
    likely = drawn.likely_on_host(len(samples))
    counts = kept.tolist()
    for sample, count, ids, own in zip(samples, counts, *rows):
        if count < steps:
            ids, own = ids[:count], own[:count]
        sample.ids.extend(ids, count)
        sample.log_probs.extend(own, count)
    if plain is not None or likely is not None:
        for row, (sample, count) in enumerate(zip(samples, counts)):
            if plain is not None:
                sample.plain_log_probs.extend(plain[row, :count], count)
            if likely is not None and sample.sampling.top_log_probs:
                sample.extend_likely(*(part[row, :count] for part in likely))
    for row, (sample, count) in enumerate(zip(samples, counts)):
        if sample.sampling.stop_strings and _cut_at_stop_string(sample, sample.ids.count - count, tokenizer):
            stopped[row] = True
    ended = np.flatnonzero(stopped | (kept == remaining)).tolist()
    return [(samples[row], "stop" if stopped[row] else "length") for row in ended]


def _cut_at_stop_string(sample: SequenceState, before: int, tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Cut after a stop string that ends after the first `before` tokens; returns whether there is one."""
    assert tokenizer is not None, "checked with the sampling parameters"
    end = stop_string_end(
        *(sample.ids.array, before, sample.sampling.min_new_tokens, sample.sampling.stop_strings),
        lambda ids: tokenizer.decode(ids.tolist()),
    )
    if end is None:
        return False
    for column in sample.columns:
        column.cut(min(end, len(column)))
    return True


def trajectory_of(sample: SequenceState, finish: Finish, version: int) -> Trajectory:
    """`version`: of the weights that sampled the new tokens."""
    prompt, ids, log_probs = sample.prompt, sample.ids.array, sample.log_probs.array
    versions = sample.partial.versions_with(len(ids), version)
    rollout = Trajectory(prompt.index, sample.number, prompt.ids, ids, log_probs, finish, versions=versions)
    rollout.plain_log_probs = sample.plain_log_probs.array if sample.sampling.plain_log_probs else None
    rollout.alternatives = None if sample.likely is None else TopLogprobs(*(c.array for c in sample.likely))
    return rollout
