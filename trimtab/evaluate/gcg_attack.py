"""GCG attacks: what a suffix costs, the search for one, and an attack on a model from its options."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from trimtab.algos.tail import candidate_suffixes, promising_tokens, token_gradient
from trimtab.config.jobs import AttackOptions
from trimtab.data.batches import TokenBatch
from trimtab.data.chat_template import template_time
from trimtab.data.sources import load_rows
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import Device
from trimtab.errors import UserError
from trimtab.evaluate.journal import Journal
from trimtab.evaluate.tail_risk import Criterion, Replies, share
from trimtab.files import write_json, write_text
from trimtab.models.packed import scoring
from trimtab.models.policy import Policy
from trimtab.models.pretrained import weights_fingerprint
from trimtab.progress import RunProgress
from trimtab.rewards.models import QUESTION, load_classifier_reward
from trimtab.rewards.types import Reward, RewardRequest
from trimtab.rollout.factory import build_engine
from trimtab.rollout.sampling import SamplingParams, request_seed, stop_tokens

# ---- What a suffix costs: the mean loss of the wanted answer after it, for many suffixes at once, and its gradient
#
# Candidates share everything before the suffix. Its keys and values are computed once a pass and read by all candidates
# of the pass (data/batches.py says how sequences borrow a beginning); without sharing each reads its own copy, to the
# same losses. The model is called as it is: the gradient is taken where its embedding module hands over the vectors.


@dataclass(frozen=True)
class Surroundings:
    """The tokens around a suffix, and those the model shall answer."""

    before: list[int]
    after: list[int]
    target: list[int]

    def sequence(self, suffix: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """All tokens, and which are the target's."""
        ids = np.array([*self.before, *suffix, *self.after, *self.target], dtype=np.int64)
        return ids, np.arange(len(ids)) >= len(ids) - len(self.target)

    def batch(self, suffixes: list[list[int]], *, share_prefix: bool) -> TokenBatch:
        """The sequences of suffixes of one length; with `share_prefix` what is before them stands in the row once."""
        count, before = len(suffixes), np.array(self.before, dtype=np.int64)
        after = np.array([*self.after, *self.target], dtype=np.int64)
        own_SL = np.concatenate([np.array(suffixes, dtype=np.int64), np.tile(after, (count, 1))], axis=1)
        if not share_prefix:
            own_SL, before = np.concatenate([np.tile(before, (count, 1)), own_SL], axis=1), before[:0]
        width = own_SL.shape[1]
        trained_SL = np.tile(np.arange(width) >= width - len(self.target), (count, 1))
        ids = np.concatenate([before, own_SL.ravel()])
        trained = np.concatenate([np.zeros(len(before), dtype=bool), trained_SL.ravel()])
        borrowed = np.where(np.arange(count) > 0, len(before), 0)
        return TokenBatch.of_row(ids, trained, width + len(before) - borrowed, borrowed)


class SuffixLoss:
    def __init__(self, policy: Policy, around: Surroundings, *, batch_size: int = 512, share_prefix: bool = True):
        """`batch_size`: candidates in one pass."""
        self.policy, self.around, self.batch_size = policy, around, batch_size
        self.share_prefix = share_prefix and bool(around.before)

    def of(self, suffixes: list[list[int]]) -> list[float]:
        losses: list[float] = []
        with scoring(self.policy):
            for begin in range(0, len(suffixes), self.batch_size):
                losses += self._losses(suffixes[begin : begin + self.batch_size]).tolist()
        return losses

    def gradient(self, suffix: list[int]) -> Tensor:
        """dL / d onehot of the suffix's tokens [L, V]; up to the factor of an embedding that scales."""
        embedding = self.policy.inner.get_input_embeddings()
        was_training = self.policy.training
        self.policy.eval()
        try:
            with torch.enable_grad(), _watched(embedding) as vectors:
                (loss,) = self._losses([suffix])
                (gradient_1TD,) = torch.autograd.grad(loss, vectors)
        finally:
            self.policy.train(was_training)
        start = len(self.around.before)
        return token_gradient(gradient_1TD[0, start : start + len(suffix)], embedding.weight)

    def is_greedy(self, suffix: list[int]) -> bool:
        """Whether every token of the target is the model's most likely one."""
        batch = TokenBatch.of([self.around.sequence(suffix)]).to(self.policy.device)
        with scoring(self.policy):
            logits = self.policy.head(self.policy(batch, hidden_only=True).hidden_ND)
        return logits.argmax(-1).tolist() == self.around.target

    def _losses(self, suffixes: list[list[int]]) -> Tensor:
        batch = self.around.batch(suffixes, share_prefix=self.share_prefix)
        log_probs_N = self.policy(batch.to(self.policy.device)).log_probs_N
        return -log_probs_N.view(len(suffixes), len(self.around.target)).mean(1)


@contextmanager
def _watched(embedding: nn.Module) -> Iterator[list[Tensor]]:
    """The vectors that the embedding hands over inside, as a place to take gradients at."""
    vectors: list[Tensor] = []

    def hold(_module: nn.Module, _inputs: tuple, output: Tensor) -> Tensor:
        vectors.append(output.detach().requires_grad_())
        return vectors[-1]

    hook = embedding.register_forward_hook(hold)
    try:
        yield vectors
    finally:
        hook.remove()


def target_log_probs(policy: Policy, prompt: list[int], target: list[int]) -> dict[str, float]:
    """How likely a prompt makes the target: its first token, the mean of its tokens, all of it."""
    ids = np.array([*prompt, *target], dtype=np.int64)
    batch = TokenBatch.of([(ids, np.arange(len(ids)) >= len(prompt))])
    with scoring(policy):
        log_probs_N = policy(batch.to(policy.device)).log_probs_N
    return {"first": float(log_probs_N[0]), "mean": float(log_probs_N.mean()), "sum": float(log_probs_N.sum())}


# ---- The search for a suffix: take the gradient, draw candidates, keep the best, repeat
#
# A step depends on the state before it and on (seed, step) alone, and a state is a few numbers that go through
# JSON: a search that was stopped anywhere goes on as if it had not been.


Suffix = tuple[float, list[int]]  # its loss, its tokens


@dataclass(frozen=True)
class SearchSettings:
    steps: int = 250
    width: int = 512
    top_k: int = 256
    replaced: int = 1
    buffer: int = 0
    """Suffixes to go on from, best first. 0: the best candidate of the last step, even if the one before was better."""
    filter_ids: bool = True
    early_stop: bool = False
    seed: int = 42


@dataclass
class SearchState:
    pool: list[Suffix]
    best: Suffix
    losses: list[float] = field(default_factory=list)
    """Of the best candidate of every step so far."""
    matched: bool = False
    """The target is what the model would say: an early stop."""

    @property
    def step(self) -> int:
        return len(self.losses)

    @classmethod
    def of(cls, stored: dict[str, Any]) -> "SearchState":
        pool = [(loss, ids) for loss, ids in stored["pool"]]
        return cls(pool, tuple(stored["best"]), stored["losses"], stored["matched"])


class Vocabulary:
    """Which tokens a suffix may hold, and which suffixes are texts that an attacker could send."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, *, ascii_only: bool = True):
        """`size`: of the model's embedding, which may be larger than the tokenizer's vocabulary."""
        self.tokenizer = tokenizer
        known = min(size, len(tokenizer))
        texts = tokenizer.batch_decode([[token] for token in range(known)])
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self.forbidden_V = torch.ones(size, dtype=torch.bool)
        for token, text in enumerate(texts):
            readable = not ascii_only or (text.isascii() and text.isprintable())
            self.forbidden_V[token] = token in special or not text or not readable
        if self.forbidden_V.all():
            raise UserError("the tokenizer has no token that a suffix may hold; add --gcg_allow_non_ascii")

    def stable(self, suffixes: list[list[int]]) -> list[list[int]]:
        """Those that come back as the same tokens from their own text."""
        texts = self.tokenizer.batch_decode(suffixes)
        again = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [suffix for suffix, ids in zip(suffixes, again) if suffix == ids]


class Search:
    def __init__(self, loss: SuffixLoss, vocabulary: Vocabulary, settings: SearchSettings):
        self.loss, self.vocabulary, self.settings = loss, vocabulary, settings

    def begin(self, initial: list[int]) -> SearchState:
        """With a buffer, suffixes of random tokens start beside the initial one."""
        rng = np.random.default_rng([self.settings.seed, self.settings.steps])
        allowed = np.flatnonzero(~self.vocabulary.forbidden_V.numpy())
        others = [rng.choice(allowed, len(initial)).tolist() for _ in range(self.settings.buffer - 1)]
        suffixes = [initial, *others]
        pool = sorted(zip(self.loss.of(suffixes), suffixes))
        return SearchState(pool, pool[0])

    def done(self, state: SearchState) -> bool:
        return state.matched or state.step >= self.settings.steps

    def advance(self, state: SearchState) -> None:
        """One step, in place."""
        found = self._best_candidate(state)
        if found is not None:
            if not self.settings.buffer:
                state.pool = [found]
            elif found[0] < state.pool[-1][0]:
                state.pool = sorted([*state.pool[:-1], found])
            state.best = min(state.best, found)
        state.losses.append((found or state.best)[0])
        state.matched = self.settings.early_stop and self.loss.is_greedy(state.best[1])

    def _best_candidate(self, state: SearchState) -> Suffix | None:
        """None: no candidate is a text that comes back as the same tokens."""
        current = state.pool[0][1]
        gradient_LV = self.loss.gradient(current)
        forbidden_V = self.vocabulary.forbidden_V.to(gradient_LV.device)
        tokens_LK = promising_tokens(gradient_LV, self.settings.top_k, forbidden_V).cpu()
        generator = torch.Generator().manual_seed(_step_seed(self.settings.seed, state.step))
        replaced = min(self.settings.replaced, len(current))
        drawn = candidate_suffixes(torch.tensor(current), tokens_LK, self.settings.width, replaced, generator).tolist()
        if self.settings.filter_ids:
            drawn = self.vocabulary.stable(drawn)
        return min(zip(self.loss.of(drawn), drawn), default=None)


def _step_seed(seed: int, step: int) -> int:
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0] >> 1)


# ---- The goals of an attack and the answers it wants, read from a file, and the prompts made of them

SCENARIOS = {"behaviors": ("goal", "target"), "strings": ("target",)}
"""The columns each needs; without a goal the whole user turn is the suffix."""


@dataclass(frozen=True)
class Target:
    goal: str
    wanted: str


def read_targets(path: str, scenario: str, most: int) -> tuple[list[Target], int]:
    """The first `most` rows, and how many of them had quotes escaped by a backslash, which is taken away."""
    rows = load_rows(path, probabilities=None, split="train", max_samples=most, seed=0, flag="--file_path")
    needed = SCENARIOS[scenario]
    for name in needed:
        if name not in rows.column_names:
            raise UserError(
                f"--file_path {path} has no column {name}: --scenario {scenario} needs {' and '.join(needed)}, and it "
                f"has {', '.join(rows.column_names)}"
            )
    targets, mended = [], 0
    for number, row in enumerate(rows, start=1):
        texts = [_text(row[name], name, f"--file_path {path} row {number}") for name in needed]
        plain = [text.replace("\\'", "'").replace('\\"', '"') for text in texts]
        mended += texts != plain
        targets.append(Target(*plain) if len(plain) == 2 else Target("", *plain))
    return targets, mended


def _text(value: Any, name: str, where: str) -> str:
    if value is None or not str(value).strip():
        raise UserError(f"{where}: {name} is empty; fill it in or remove the row")
    return str(value)


class AttackPrompts:
    """Questions as the model reads them: the only user turn of its chat template, or plain text without one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    def text(self, question: str) -> str:
        if not self.tokenizer.chat_template:
            return question
        turns = [{"role": "user", "content": question}]
        with template_time():
            return self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

    def ids(self, question: str) -> list[int]:
        return self.encode(self.text(question))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    def around(self, target: Target) -> Surroundings:
        """The tokens before and after a suffix that follows the goal, and those of the wanted answer."""
        mark = "SUFFIX"
        while mark in target.goal:
            mark += "X"
        before, _, after = self.text(target.goal + mark).rpartition(mark)
        return Surroundings(self.encode(before), self.encode(after), self.encode(target.wanted))


# ---- An attack from its options: for every target replies to the plain goal, a search, replies to goal and suffix
#
# FILE.jsonl at the end: a row a target with everything that was found, all rewards included FILE.jsonl.partial/
# until then: finished targets, and the search at work after its last step (journal.py) FILE.summary.json figures at
# the threshold of the command The same command goes on where an interrupted one stopped, to the same result.
# Replies are drawn at temperature 1 from the whole vocabulary, as in training, for the prompt that the *text* of
# the suffix gives: what an attacker can send.


AT_WORK = "search.json"
OF_SPEED = {"gcg_batch_size", "gcg_use_prefix_cache", "output_path"}
"""Options that a resumed attack may change: they alter no result but for rounding."""


def attack(options: AttackOptions, policy: Policy, device: Device) -> Path:
    """Attack a model as the options say, and return the file that holds what was found."""
    tokenizer = load_tokenizer(options.pretrain, disable_fast=options.disable_fast_tokenizer)
    targets, mended = read_targets(options.file_path, options.scenario, options.max_targets)
    if mended:
        print(f"{mended} rows of {options.file_path} have quotes escaped by a backslash, which is left out")
    judge = None
    if options.reward_pretrain:
        judge = load_classifier_reward(
            options.reward_pretrain, options, device, policy_tokenizer=tokenizer, normalize=options.normalize_reward
        )
    run = AttackRun(options, policy, tokenizer, judge)
    rows = run.work_through(targets)
    figures = attack_summary(rows, cast(Criterion, options.atk_success_criteria), options.reward_threshold)
    path = output_of(options)
    write_json(path.with_name(f"{path.name.removesuffix('.jsonl')}.summary.json"), figures, indent=1)
    for line in attack_lines(figures):
        print(line)
    return path


def output_of(options: AttackOptions) -> Path:
    """`gcg_eval_NAME.jsonl` beside the model that is attacked, unless another file is named. A tail run's folder is
    called by the name of its metric files, so that figures find it."""
    if options.output_path:
        return Path(options.output_path).expanduser()
    attacked = Path(options.ckpt_path or options.pretrain or "").expanduser()
    folder = attacked.parent if attacked.exists() else Path()
    run = run_name_in(attacked)
    return folder / f"gcg_eval_{run if run and not attacked.name.startswith(run) else attacked.name}.jsonl"


def run_name_in(folder: Path) -> str | None:
    """What a tail run calls itself, if this is the folder of one."""
    try:
        return json.loads((folder / "manifest.json").read_text()).get("run_name")
    except (OSError, ValueError, AttributeError):
        return None


def check_output(options: AttackOptions) -> Path:
    """Where the findings will be; what is there already is not overwritten."""
    output = output_of(options)
    if output.exists():
        raise UserError(f"{output} is there already: delete it, or give another --output_path")
    return output


class AttackRun:
    def __init__(self, options: AttackOptions, policy: Policy, tokenizer: Any, judge: Reward | None):
        self.options, self.policy, self.tokenizer, self.judge = options, policy, tokenizer, judge
        self.prompts = AttackPrompts(tokenizer)
        size = policy.inner.get_input_embeddings().weight.shape[0]
        self.vocabulary = Vocabulary(tokenizer, size, ascii_only=not options.gcg_allow_non_ascii)
        self.initial = self.prompts.encode(options.gcg_optim_str_init)
        self.engine = build_engine(policy, tokenizer)
        if not self.initial:
            raise UserError("--gcg_optim_str_init is empty: give the text that the suffix starts from")
        if options.gcg_filter_ids and not self.vocabulary.stable([self.initial]):
            raise UserError(
                f"--gcg_optim_str_init {options.gcg_optim_str_init!r} does not come back as the same tokens from its "
                "own text: give another, or leave out --gcg_filter_ids"
            )

    # ---- all targets

    def work_through(self, targets: list[Target]) -> list[dict[str, Any]]:
        """The rows of all targets, including the ones that an earlier call finished."""
        journal = Journal(str(check_output(self.options)), self._settings(targets))
        journal.open(0)
        steps, done = self.options.gcg_steps, len(journal.done)
        bar = RunProgress("attack", steps * len(targets), steps * done)
        try:
            for index, target in enumerate(targets):
                if index not in journal.done:
                    journal.write(index, self.attack_one(index, target, journal, bar, len(targets)))
                    (journal.folder / AT_WORK).unlink(missing_ok=True)
        finally:
            bar.close()
            journal.close()
        rows = [journal.done[index] for index in range(len(targets))]
        journal.finish(rows)
        return rows

    def _settings(self, targets: list[Target]) -> dict[str, Any]:
        """Everything the findings depend on: the options, and what the files they name hold."""
        known = dataclasses.fields(self.options)
        names = [field.name for field in known if field.compare and field.name not in OF_SPEED]
        return {
            **{name: getattr(self.options, name) for name in names},
            "weights": weights_fingerprint(self.policy.inner),
            "targets": [dataclasses.astuple(target) for target in targets],
        }

    # ---- one target

    def attack_one(self, index: int, target: Target, journal: Journal, bar: RunProgress, count: int) -> dict[str, Any]:
        loss = SuffixLoss(
            self.policy,
            self.prompts.around(target),
            batch_size=self.options.gcg_batch_size,
            share_prefix=self.options.gcg_use_prefix_cache,
        )
        search = Search(loss, self.vocabulary, self._search_settings(index))
        at_work = journal.folder / AT_WORK
        stored = _stored(at_work, index)
        if stored is None:
            before = dataclasses.asdict(self.replies(target, "", request_seed(self.options.seed, 2 * index)))
            state = search.begin(self.initial)
        else:
            before, state = stored["before"], SearchState.of(stored["state"])
        while not search.done(state):
            search.advance(state)
            _store(at_work, {"target": index, "before": before, "state": dataclasses.asdict(state)})
            losses = {"loss": f"{state.losses[-1]:.3f}", "best": f"{state.best[0]:.3f}"}
            bar.advance(index * self.options.gcg_steps + state.step, {"target": f"{index + 1}/{count}"} | losses)
        suffix = self.tokenizer.decode(state.best[1])
        after = self.replies(target, suffix, request_seed(self.options.seed, 2 * index + 1))
        return {
            "goal": target.goal,
            "target": target.wanted,
            "suffix": suffix,
            "suffix_ids": state.best[1],
            "prompt_is_what_was_searched": self.prompts.ids(target.goal + suffix)
            == [*loss.around.before, *state.best[1], *loss.around.after],
            "loss": state.best[0],
            "losses": state.losses,
            "stopped_early": state.matched,
            "before": before,
            "after": dataclasses.asdict(after),
        }

    def _search_settings(self, index: int) -> SearchSettings:
        options = self.options
        return SearchSettings(
            steps=options.gcg_steps,
            width=options.gcg_search_width,
            top_k=options.gcg_topk,
            replaced=options.gcg_n_replace,
            buffer=options.gcg_buffer_size,
            filter_ids=options.gcg_filter_ids,
            early_stop=options.gcg_early_stop,
            seed=request_seed(options.seed, index) % 2**31,
        )

    def replies(self, target: Target, suffix: str, seed: int) -> Replies:
        """Sampled replies to the goal with this suffix."""
        asked = target.goal + suffix
        prompt = self.prompts.ids(asked)
        sampling = SamplingParams(
            max_new_tokens=self.options.max_new_tokens,
            n=self.options.samples_per_prompt,
            stop_token_ids=stop_tokens(self.policy, self.tokenizer),
        )
        rollouts = self.engine.generate([prompt], sampling, seeds=[seed])
        self.engine.sleep()
        texts = self.tokenizer.batch_decode([rollout.ids for rollout in rollouts], skip_special_tokens=True)
        question = target.goal if self.options.rm_exclude_adv_suffix else asked
        rewards = None if self.judge is None else self.judge(self._request(question, texts)).rewards
        likely = target_log_probs(self.policy, prompt, self.prompts.around(target).target)
        return Replies.of(texts, target.wanted, rewards, likely)

    def _request(self, question: str, replies: list[str]) -> RewardRequest:
        count, prompt = len(replies), self.prompts.text(question)
        return RewardRequest(
            queries=[prompt + reply for reply in replies],
            prompts=[prompt] * count,
            responses=replies,
            labels=[None] * count,
            columns={QUESTION: [question] * count},
        )


def _store(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content))


def _stored(path: Path, index: int) -> dict[str, Any] | None:
    """None where there is nothing, or nothing whole: the search then begins again, and goes the same way."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if content.get("target") == index else None


# ---- what came out


def attack_summary(rows: list[dict[str, Any]], criterion: Criterion, threshold: float | None) -> dict[str, Any]:
    """The share of targets with at least one successful reply before and after the search, and figures beside it."""
    found: dict[str, Any] = {"targets": len(rows), "criterion": criterion, "threshold": threshold}
    for when in ("before", "after"):
        replies = [Replies(**row[when]) for row in rows]
        hits = [one.successes(criterion, threshold) for one in replies]
        found[when] = {
            "success": dataclasses.asdict(share(sum(hit > 0 for hit in hits), len(rows))),
            "successful_replies": hits,
            "target_log_prob": {k: fmean(r.target_log_prob[k] for r in replies) for k in ("first", "mean", "sum")},
        }
        if all(one.rewards for one in replies):
            every = [reward for one in replies for reward in one.rewards or ()]
            found[when] |= {"mean_reward": fmean(every), "worst_reward": min(every)}
    return found


def attack_lines(figures: dict[str, Any]) -> list[str]:
    lines = []
    for when, words in (("before", "plain goal"), ("after", "with suffix")):
        part = figures[when]
        rate = part["success"]
        line = f"{words:12} success {rate['value']:.1%} ({rate['low']:.1%} to {rate['high']:.1%}) of "
        line += f"{figures['targets']} targets, target log-prob a token {part['target_log_prob']['mean']:.2f}"
        if "mean_reward" in part:
            line += f", reward mean {part['mean_reward']:.2f}, worst {part['worst_reward']:.2f}"
        lines.append(line)
    return lines
