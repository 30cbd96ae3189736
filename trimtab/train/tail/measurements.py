"""Measurements and files of a tail run: exact probability of bad words, held-out samples, rare events, bad texts.

before, and after each fit step    log P(an answer to the one prompt holds a bad token)
after training                     held-out answers of the policy: rewards, returns, KL, tail risk; and P(bad) by
                                   importance sampling from the proposal, next to the plain estimate

save_path/         proposal/ of repulse; bad_texts.jsonl with --save_negdata
save_info_path/    the files that evaluate/tail_risk.py describes, under the run's name
"""

import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trimtab.algos.group_rewards import answer_sums
from trimtab.algos.policy_losses import kl_estimate
from trimtab.algos.tail import answer_returns, log_ratios
from trimtab.config.repulse_aliases import run_name
from trimtab.config.rl_jobs import TailOptions
from trimtab.config.rl_options import GPT2_BAD_TOKENS
from trimtab.data.batches import TokenBatch
from trimtab.data.prompts import PromptDataset
from trimtab.distributed.device import widest
from trimtab.distributed.fsdp import gathered
from trimtab.distributed.launcher import Role
from trimtab.errors import UserError
from trimtab.evaluate import tail_risk
from trimtab.evaluate.tail_risk import mean, probability_below, rare_event
from trimtab.files import writing
from trimtab.models.lm_head import chunk_tokens, shaped_logits
from trimtab.models.packed import scoring
from trimtab.models.policy import Policy
from trimtab.rollout.sampling import request_seed
from trimtab.train.metrics import MetricsFile, read_rows
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.files import RunFiles
from trimtab.train.rl.rollout_client import RolloutClient

HELD_OUT = "heldout"  # the store of held-out prompts
SEED = 0x7A11  # the same random streams in every run, so that two differ only by the model
THRESHOLDS = (-5.0, -7.0)  # of the paper, without --bad_threshold
LEVELS = (0.0001, 0.003, 0.01, 0.1)


class BadWords(Role):
    """A role in the policy's processes: the exact probability of an answer with a bad token."""

    def __init__(self, policy: Policy, tokens: Sequence[int], length: int, stops: Sequence[int]):
        self.policy, self.arguments = policy, (tokens, length, stops)

    def measure(self, *, prompt: list[int]) -> float:
        with gathered(self.policy):
            return log_bad_probability(self.policy, prompt, *self.arguments)


def bad_tokens(options: TailOptions, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    if options.bad_token_ids:
        return tuple(options.bad_token_ids)
    if len(tokenizer) > 50256 and tokenizer.convert_ids_to_tokens([262, 50256]) == ["Ġthe", "<|endoftext|>"]:
        return GPT2_BAD_TOKENS
    raise UserError(
        f"--analytic_bad_word_calc: the swear words are known in GPT-2's vocabulary, which {options.pretrain} does not "
        "have; give the bad tokens as --bad_token_ids"
    )


class TailMeasurements:
    """Measures before, during and after the training of a tail run."""

    def __init__(self, options: TailOptions, samples: int, first_prompt: list[int], held_out: PromptDataset | None):
        """`samples`: number of prompts in an episode (one pass over the data)."""
        self.options, self.first_prompt, self.held_out = options, first_prompt, held_out
        self.prompts_a_fit_step = samples * options.num_episodes

    def before(self, run: Any) -> dict[str, float]:
        if run.roles.bad_words is None:
            return {}
        return {"log_bad_probability": run.roles.bad_words.call("measure", prompt=self.first_prompt)[0]}

    def during(self, run: Any, prompts: int) -> dict[str, float]:
        """At the end of an iteration over `prompts`: measure again if it completes a fit step."""
        used = run.counters.prompts_used
        return self.before(run) if (used + prompts) // self.prompts_a_fit_step > used // self.prompts_a_fit_step else {}

    def after(self, run: Any) -> bool:
        """Measure held-out answers after training; False: interrupted by a stop request."""
        run.files.write_history()
        if self.held_out is None:
            return True
        own = self.answers(run, run.client, 0)
        proposed = None if run.roles.proposal is None else self.answers(run, run.proposal_client, 1)
        if own is None or (run.roles.proposal is not None and proposed is None):
            return False
        found = self.examined(run, own)
        prompts = own.rows_S.tolist()
        figures = tail_risk.summary(found, self.thresholds, LEVELS, prompts)
        whole_kl = found.token_kl * own.lengths_S.numpy()
        figures["kl_per_answer"] = tail_risk.in_both_ways(mean, whole_kl, prompts=prompts)
        if proposed is not None:
            figures["rare_events"] = self.rare_events(run, own, proposed)
        tail_risk.write_held_out(run.files.info, run.files.name, found)
        path = tail_risk.write_summary(run.files.info, run.files.name, finite(figures))
        print(f"held-out {path}", flush=True)
        return True

    @property
    def thresholds(self) -> tuple[float, ...]:
        return THRESHOLDS if self.options.bad_threshold is None else (self.options.bad_threshold,)

    def answers(self, run: Any, client: RolloutClient, stream: int) -> Experience | None:
        assert self.held_out is not None
        rows = range(len(self.held_out))
        requests = [
            (row, request_seed(request_seed(SEED + stream, turn), row))
            for turn in range(self.options.sampling_iters)
            for row in rows
        ]
        return client(requests, HELD_OUT, run.sampling)

    def examined(self, run: Any, own: Experience) -> tail_risk.HeldOut:
        run.batcher.fill(own, "old_N", run.roles.actor, "log_probs")
        run.batcher.fill(own, "reference_N", run.roles.initial, "log_probs")
        owners_N, answers = own.owners_N, len(own)
        kl_N = kl_estimate(own.old_N, own.reference_N, "k1")
        returns_S = answer_returns(own.rewards_S, kl_N, self.options.init_kl_coef, owners_N)
        kl_S, surprisal_S = answer_sums(kl_N, owners_N, answers), -answer_sums(own.old_N, owners_N, answers)
        columns = (own.rewards_S, returns_S, kl_S / own.lengths_S, surprisal_S)
        return tail_risk.HeldOut(*(column.numpy() for column in columns))

    def rare_events(self, run: Any, own: Experience, proposed: Experience) -> dict[str, Any]:
        """P(bad) at each threshold, from the proposal's answers and from the policy's own."""
        run.batcher.fill(proposed, "old_N", run.roles.proposal, "log_probs")
        run.batcher.fill(proposed, "policy_N", run.roles.actor, "log_probs")
        weights = log_ratios(proposed.policy_N, proposed.old_N, proposed.owners_N, len(proposed)).numpy()
        found = {}
        for threshold in self.thresholds:
            bad = (proposed.rewards_S < threshold).numpy()
            own_prompts, prompts = own.rows_S.tolist(), proposed.rows_S.tolist()
            found[f"{threshold:g}"] = {
                "importance": tail_risk.in_both_ways(rare_event, weights, bad, prompts=prompts),
                "plain": tail_risk.in_both_ways(
                    probability_below, own.rewards_S.numpy(), threshold, prompts=own_prompts
                ),
            }
        return found


def finite(figures: Any) -> Any:
    """Replace non-finite numbers by None, since JSON has none."""
    if isinstance(figures, dict):
        return {name: finite(value) for name, value in figures.items()}
    return None if isinstance(figures, float) and not math.isfinite(figures) else figures


# ---- files


BAD_TEXTS = "bad_texts.jsonl"


class TailFiles(RunFiles):
    options: TailOptions

    def __init__(self, options: TailOptions, *parts: Any):
        super().__init__(options, *parts)
        self.name = run_name(options)
        self.info = Path(options.save_info_path or options.save_path)
        self._bad: MetricsFile | None = None

    def open(self, start: int, roles: Any, *, resumed: bool) -> None:
        super().open(start, roles, resumed=resumed)
        if self.options.save_negdata:
            with writing(f"--save_path {self.folder}: cannot write there"):
                self._bad = MetricsFile(self.folder / BAD_TEXTS, resume_from=start if resumed else None)

    def close(self) -> None:
        super().close()
        if self._bad is not None:
            self._bad.close()

    def bad_texts(self, experience: Experience) -> list[str]:
        """With --save_negdata: prompt and answer of the samples with a reward below the threshold."""
        if not self.options.save_negdata:
            return []
        bad = (experience.rewards_S < self.options.save_negdata_threshold).nonzero()[:, 0].tolist()
        ids = [experience.prompt(i) + experience.response(i) for i in bad]
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def keep_bad_texts(self, step: int, texts: list[str]) -> None:
        if texts:
            assert self._bad is not None
            with writing(f"--save_path {self.folder}: cannot write there"):
                self._bad.write({"step": step, "texts": sorted(set(texts))})

    def write_history(self) -> None:
        """Write the files about the whole training from metrics.jsonl, which also has the rows before a resume."""
        options, rows = self.options, read_rows(self.folder / "metrics.jsonl")
        updates = [row for row in rows if row["step"] > 0]
        tail_risk.write_updates(self.info, self.name, [row["reward"] for row in updates])
        if options.analytic_bad_word_calc:
            measured = [row for row in rows if "log_bad_probability" in row]
            # Nothing is sampled before the first update, so the first rollout represents the start.
            sampled = [updates[0], *(row for row in measured if row["step"] > 0)]
            analytic = tail_risk.Analytic(
                [row["log_bad_probability"] for row in measured],
                [row["reward"] for row in sampled],
                [row["reward"] - row.get("kl_coefficient", 0.0) * row.get("kl_answer", 0.0) for row in sampled],
            )
            tail_risk.write_analytic(self.info, self.name, analytic)
        if options.save_negdata:
            texts = {text for row in read_rows(self.folder / BAD_TEXTS) for text in row["texts"]}
            place = Path(options.negdata_path) if options.negdata_path else self.info
            tail_risk.write_bad_texts(place, self.name, texts, options.save_negdata_threshold)

    def _export(self, roles: Any, folder: Path) -> None:
        super()._export(roles, folder)
        if roles.proposal is not None:
            self._save(roles.proposal, folder / "proposal")


# ---- The exact probability that a short answer holds a bad token, by summing over everything the model could say
#
#     P(bad within T) = sum over t < T, over s_1..s_t without a bad or an end token, of p(s_1..s_t) p(bad | s_1..s_t)
#
# An answer that has ended says nothing more, so end tokens are no way to go on. One pass for the prompt, V for the
# second token, V^2 for the third: meant for two tokens of a real vocabulary, or for more of a small one.

MOST_PREFIXES = 5_000_000
PASS_TOKENS = 8192


def log_bad_probability(
    policy: Policy,
    prompt: Sequence[int],
    bad_tokens: Collection[int],
    tokens: int,
    stop_tokens: Collection[int] = (),
) -> float:
    """log P(one of `bad_tokens` among the first `tokens` tokens of an answer to `prompt`)."""
    check_countable(policy.config.get_text_config().vocab_size, bad_tokens, tokens)
    if not prompt:
        raise UserError("the probability of bad words needs a prompt of at least one token")
    if policy.path == "logits":
        raise UserError(f"the probability of bad words needs hidden states, which {type(policy.inner).__name__} hides")
    bad = sorted(set(bad_tokens))
    good = _without(policy.config.get_text_config().vocab_size, {*bad_tokens, *stop_tokens})
    exactly = {"dtype": widest(policy.device), "device": policy.device}
    total = torch.tensor(-math.inf, **exactly)
    # What the model may have said so far [F, t], and the log-probability of having said it.
    said, log_probs_F = np.zeros((1, 0), dtype=np.int64), torch.zeros(1, **exactly)
    with scoring(policy):
        for place in range(tokens):
            going_on = place < tokens - 1
            asked = torch.tensor([*bad, *good] if going_on else bad, device=policy.device)
            pieces = []
            for rows, next_RK in next_log_probs(policy, prompt, said, asked):
                joint_RK = next_RK.to(total.dtype) + log_probs_F[rows, None]
                total = torch.logaddexp(total, joint_RK[:, : len(bad)].logsumexp((0, 1)))
                pieces.append(joint_RK[:, len(bad) :].flatten())
            if going_on:
                said, log_probs_F = _extended(said, good), torch.cat(pieces)
    return float(total)


def next_log_probs(
    policy: Policy, prompt: Sequence[int], said: np.ndarray, asked_K: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Log-probs [R, K] of the asked tokens after the prompt and each row of `said`, some rows at a time, in order. The
    prompt is read once a pass."""
    rows_a_pass = max(1, PASS_TOKENS // max(1, said.shape[1]))
    for begin in range(0, len(said), rows_a_pass):
        part = said[begin : begin + rows_a_pass]
        sequences = [np.concatenate([prompt, row]).astype(np.int64) for row in part]
        shared = [0, *[len(prompt)] * (len(part) - 1)] if said.shape[1] else None
        batch = TokenBatch.of([(ids, np.zeros(len(ids), dtype=bool)) for ids in sequences], shared)
        hidden_TD, _ = policy.hidden(batch.to(policy.device))
        last_RD = hidden_TD[batch.last_S.to(policy.device)]
        size = chunk_tokens(policy.config.get_text_config().vocab_size, policy.device)
        for first in range(0, len(part), size):
            logits = shaped_logits(policy.head(last_RD[first : first + size]), policy.logit_shape, 1.0)
            rows = slice(begin + first, begin + first + len(logits))
            # The softmax over all tokens, of which only the asked ones are kept.
            yield rows, logits[:, asked_K] - logits.logsumexp(-1, keepdim=True)


def _extended(said: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Every row with every one of these tokens after it."""
    return np.concatenate([np.repeat(said, len(tokens), axis=0), np.tile(tokens, len(said))[:, None]], axis=1)


def _without(vocabulary: int, left_out: Collection[int]) -> np.ndarray:
    """All tokens but these, in order."""
    return np.setdiff1d(np.arange(vocabulary), np.fromiter(left_out, dtype=np.int64, count=len(left_out)))


def check_countable(vocabulary: int, bad_tokens: Collection[int], tokens: int) -> None:
    """Refuse tokens that are none, and answers that are too many."""
    if not bad_tokens or not all(0 <= token < vocabulary for token in bad_tokens):
        raise UserError(f"--bad_token_ids: give token ids from 0 to {vocabulary - 1}, at least one")
    if tokens < 1 or vocabulary ** (tokens - 1) > MOST_PREFIXES:
        raise UserError(
            f"--generate_max_len {tokens}: the exact probability of bad words looks at every beginning of an answer, "
            f"which {vocabulary} tokens allow for at most {_longest(vocabulary)}; ask for fewer, or sample instead"
        )


def _longest(vocabulary: int) -> int:
    return 1 + int(math.log(MOST_PREFIXES) / math.log(vocabulary))
