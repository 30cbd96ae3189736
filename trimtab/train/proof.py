"""Checks that a run learns what it should, tried on a few samples before the first step.

    data, rendering              what is learnt from, without weights; also in --dry_run
    update, micro_batches,       a trial of the update on the loaded model: `TrialUpdate` restores weights, masters,
    neighbours                   moments and random streams bit for bit
    checkpoint, export           on disk, in a temporary folder; in `trimtab check` only, where no run follows

RL adds reward, objective and engine (rl/rl_proof.py). The names are those of CHECKS in config/training_options.py. A
start spends at most 1 % of the planned run on checks, but 5 s are always allowed; `trimtab check` runs all of them.
"""

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trimtab.config.training_options import CHECKS, ProofOptions
from trimtab.data.batches import TokenBatch
from trimtab.data.chat_template import ChatRenderer
from trimtab.distributed.fsdp import local, reshard_model
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.random_state import random_state, restore_random_state
from trimtab.distributed.supervision import own_heartbeat
from trimtab.errors import UserError
from trimtab.models.packed import PackedModel, dropout_off, scoring
from trimtab.models.pretrained import from_pretrained
from trimtab.models.reward import HEAD, AutoClassifier, RewardModel
from trimtab.train.optimizer import Optimizer
from trimtab.train.update import LossTerm

SECONDS = 5.0  # that checks may always take
SHARE = 0.01  # of the planned run
SAMPLES = 4  # of a trial
SIZE = 0.02  # of the elements of a tensor that is 0, for noise
PROBED = 8  # tensors without a gradient whose effect on the loss is looked at
MANY_CUT = 0.5  # of the rows
SLOW, SHORT = "too slow for a start; trimtab check runs them", "out of memory"
NOISE = 3  # times what one rounding changes, sums in another order may change
ADAPTER_B = re.compile("lora_B|lora_embedding_B")
CHOOSES = re.compile(r"router|gate\.(weight|lora_)|e_score_correction_bias|indexer\.")
"""Names of weights that may only choose: experts, or the keys of sparse attention."""


@dataclass(frozen=True)
class CheckResult:
    name: str
    tried: str  # with the figure
    problem: str = ""  # what is wrong and what to do; empty: it passed
    warning: bool = False  # the run goes on

    @property
    def failed(self) -> bool:
        return bool(self.problem) and not self.warning

    def line(self) -> str:
        verdict = "failed" if self.failed else "warning" if self.problem else "passed"
        return f"check {self.name}: {self.tried}: {verdict}{': ' if self.problem else ''}{self.problem}"


Check = Callable[[], CheckResult | None]
"""Runs one check; None: there is nothing to check in this run."""


class Proof:
    """Runs checks, prints a line for each, and ends the run if one has failed. One clock measures all of them."""

    def __init__(
        self, options: ProofOptions, say: Callable[[str], None], agree: Callable[[bool], bool] = lambda over: over
    ):
        """`agree`: whether it is so in any process that runs these checks."""
        self.options, self.say, self._agree = options, say, agree
        self.results: list[CheckResult] = []
        self.left_out: dict[str, str] = {}  # names and why
        self._tried: set[str] = set()
        self._began = time.monotonic()

    def run(self, checks: dict[str, Check]) -> None:
        for name, check in checks.items():
            if self.options.wants_check(name):
                self.add(name, check())

    def add(self, name: str, result: CheckResult | None) -> None:
        assert name in CHECKS, name
        self._tried.add(name)
        if result is not None:
            self.results.append(result)
            self.say(result.line())

    def leave_out(self, names: Iterable[str], why: str) -> None:
        """Record why these checks are left out, if they are wanted and were not tried."""
        self.left_out |= {n: why for n in names if n not in self._tried and self.options.wants_check(n)}

    def has_time(self, seconds: float, planned: float) -> bool:
        """Whether checks may take this many seconds more; `planned`: seconds of the run."""
        spent = time.monotonic() - self._began + seconds
        return self.options.check_only or not self._agree(spent > max(SECONDS, SHARE * planned))

    def try_update(self, names: Iterable[str], trial: "Trial", planned: float) -> float:
        """Run these of TRIALS; `planned`: the run as a multiple of the trial's pass. Returns the seconds of a pass."""
        _, seconds = trial(None)
        for name in names:
            if self.has_time(TRIALS[name][0] * seconds, planned * seconds):
                result, found = trial(name)
                seconds = found or seconds
                self.add(name, result)
            else:
                self.leave_out([name], SLOW)
        return seconds

    def conclude(self) -> None:
        """UserError: a check has failed."""
        if failed := [result for result in self.results if result.failed]:
            names = ",".join(dict.fromkeys(result.name for result in failed))
            raise UserError(
                f"{len(failed)} of {len(self.results)} checks failed before the first step: {failed[0].name}: "
                f"{failed[0].problem}; --skip_checks {names} goes on without"
            )
        if self.results:
            names = ", ".join(dict.fromkeys(result.name for result in self.results))
            line = f"checks: {names} tried in {time.monotonic() - self._began:.1f} s"
            for why in dict.fromkeys(self.left_out.values()):
                line += f"; left out: {', '.join(name for name in self.left_out if self.left_out[name] == why)} ({why})"
            self.say(line)


def prove_without_weights(options: ProofOptions, checks: dict[str, Check]) -> list[str]:
    """The lines of these checks in a dry run. UserError: one has failed."""
    lines: list[str] = []
    proof = Proof(options, lines.append)
    proof.run(checks)
    proof.conclude()
    return lines[:-1] if proof.results else lines


# ---- data and rendering


def check_overlap(report: Any, truncated: float = 0.0, *, cut_by: str = "--max_len") -> CheckResult:
    """`report`: of the evaluation data, None without; `truncated`: the share of rows that are cut off."""
    seen, of = (report.rows_also_trained, report.rows_kept) if report is not None else (0, 0)
    tried = f"{seen:,} of {of:,} evaluation prompts are trained on too" if of else "no evaluation data"
    problem = ""
    if seen:
        problem = "they are not held out: leave them out of one of the two"
    elif truncated > MANY_CUT:
        problem = f"{truncated:.0%} of the rows are cut at {cut_by} and lack their end: raise it"
    return CheckResult("data", tried, problem, warning=True)


def check_rendering(
    example: tuple[np.ndarray, np.ndarray], row: dict[str, Any] | None, tokenizer: PreTrainedTokenizerBase, max_len: int
) -> CheckResult:
    """Look at the loss mask of one sample. `row`: the row of the data whose answers are trained as a whole; None: the
    job marks something else, and only doubled tokens are looked for."""
    ids, trained = example
    row = None if trained[1:].all() else row  # a text without prompt
    whole = len(ids) < max_len
    for token in {tokenizer.bos_token_id, tokenizer.eos_token_id} - {None}:
        if ((ids[1:] == token) & (ids[:-1] == token)).any():
            doubled = tokenizer.convert_ids_to_tokens(int(token))
            tried = f"the tokens of the first row, {len(ids)}"
            return CheckResult("rendering", tried, f"{doubled} stands there twice in a row: the template adds it, too")
    if row is None:
        return CheckResult("rendering", f"the {len(ids)} tokens of the first row, none doubled")
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = {tokenizer.eos_token_id, *tokenizer.all_special_ids, *special}

    def first_end(tokens: np.ndarray) -> int | None:
        """The first token that is not blank, if it may end a turn."""
        found = next((int(token) for token in tokens if tokenizer.decode(int(token)).strip()), None)
        return found if found in ends else None

    turns = trained_turns(trained)
    ended = sum(first_end(ids[turn][::-1]) is not None for turn in turns)
    tried = f"the first row, {len(turns)} trained turns, {ended} of them with a trained end-of-turn token"
    if not turns:
        return CheckResult("rendering", tried, "no token of it carries loss: look at --dry_run and at the columns")
    if whole and ended < len(turns):
        # A template may end a turn by the next one's first token, which is not trained.
        closing = {tokenizer.eos_token_id, first_end(ids[::-1])} - {None}
        present = any(first_end(ids[turn.stop :]) in closing for turn in turns)
        if present or not ended:
            wrong = "the end of the turn carries no loss, so the model does not learn to stop: mend the chat template"
            return CheckResult("rendering", tried, wrong, warning=not present)
    texts, opening = [text.strip() for text in strings_in(row)], opening_of(tokenizer)
    for turn in turns:
        before, answer = tokenizer.decode(ids[: turn.start]), tokenizer.decode(ids[turn], skip_special_tokens=True)
        answer = answer.strip()
        if not answer or any(text in answer for text in texts if len(text) > 1 or text == answer):
            continue
        for text in texts:
            # What a template leaves out of an answer, as earlier thoughts, does not stand before the rest of it, and
            # the generation prompt may have given its beginning.
            head = text.removesuffix(answer).strip()
            if head and text.endswith(answer) and before.rstrip().endswith(head) and not opening.endswith(head):
                wrong = f"only {answer!r} of {text!r} carries loss: the mask is shifted"
                return CheckResult("rendering", tried, wrong)
    return CheckResult("rendering", tried)


def opening_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """A prompt as the chat template ends it; empty without one."""
    try:
        return ChatRenderer(tokenizer).render_prompt([{"role": "user", "content": "x"}]).rstrip()
    except UserError:
        return ""


def trained_turns(trained: np.ndarray) -> list[slice]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], trained.astype(np.int8), [0]])))
    return [slice(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings_in(item)


# ---- a trial of the update


MakeBatches = Callable[[list[list[int] | None]], tuple[list[TokenBatch], Callable[[TokenBatch], LossTerm]]]
"""From the samples of every micro-batch (None: a filler) to the micro-batches and their loss. A micro-batch has the
weight 1 / data processes, which all have the same ones; a filler has 0."""
Accumulate = Callable[[list[TokenBatch], int, Callable[[TokenBatch], LossTerm]], Any]
"""The run's own update, up to the optimizer step: micro-batches, how many, and their loss."""
Trial = Callable[[str | None], tuple[CheckResult | None, float]]
"""Runs one of TRIALS (None: only a pass); with the seconds of a pass, or 0."""


class TrialUpdate:
    """Updates on a few samples that leave no trace. All processes of a mesh have the same samples, and each counts for
    its share."""

    def __init__(
        self,
        model: PackedModel,
        optimizer: Optimizer,
        mesh: Mesh,
        samples: int,
        make: MakeBatches,
        accumulate: Accumulate,
        *,
        fake: Callable[[], PackedModel] | None,
        balanced: bool = False,
        bf16: bool = False,
    ):
        """`fake`: makes the model without weights; None: only adapters are trained. `balanced`: the loss depends on the
        micro-batches, as that of experts does. `bf16`: passes round to it; sharded weights may be fp32 all the same."""
        self.model, self.optimizer, self.mesh, self.make = model, optimizer, mesh, make
        self.fake, self.balanced, self.bf16 = fake, balanced, bf16
        self._accumulate = accumulate
        self.whole: list[int] = list(range(samples))
        self.pass_seconds = 0.0
        assert not any(found.state for found in optimizer.optimizers), "before the first step"

    def run(self, name: str | None) -> tuple[CheckResult | None, float]:
        """A `Trial`."""
        if name is not None:
            return TRIALS[name][1](self), self.pass_seconds
        with self.restored():
            self.gradients([self.whole])
        return None, self.pass_seconds

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, dropout is off; afterwards random streams, gradients and learning rates are as before."""
        groups = [group for optimizer in self.optimizer.optimizers for group in optimizer.param_groups]
        random, rates = random_state(), [group["lr"] for group in groups]
        try:
            with dropout_off(self.model):  # in train mode, in which layers are checkpointed
                yield
        finally:
            reshard_model(self.model)
            self.optimizer.clear_gradients()
            for group, rate in zip(groups, rates):
                group["lr"] = rate
            restore_random_state(random)

    def gradients(self, parts: list[list[int] | None]) -> dict[str, Tensor]:
        """This process's shards of the gradients of one step in these micro-batches."""
        self.optimizer.clear_gradients()
        began = time.monotonic()
        batches, loss = self.make(parts)
        self._accumulate(batches, len(batches), loss)
        found = {name: local(gradient).detach() for name, gradient in self.optimizer.gradients().items()}
        if found:
            float(next(iter(found.values())).sum())  # waits for the device
        self.pass_seconds = time.monotonic() - began
        return found

    def loss(self) -> float:
        reshard_model(self.model)  # gathered weights may be older than the shards
        batches, loss = self.make([self.whole])
        with scoring(self.model):
            return sum(float(loss(batch).loss) * batch.weight for batch in batches)

    def largest(self, values: dict[str, float]) -> dict[str, float]:
        """The largest value of each name over all processes."""
        found = self.mesh.all.gather(values)
        return {name: largest(part[name] for part in found) for name in values}

    @contextlib.contextmanager
    def open_adapters(self) -> Iterator[None]:
        """Inside, the B of adapters is not zero: with B = 0 nothing reaches A."""
        masters = self.optimizer.masters
        closed = {name: local(t).detach().clone() for name, t in masters.items() if ADAPTER_B.search(name)}
        try:
            self.shift({name: masters[name] for name in closed}, 0.1)
            yield
        finally:
            for name, before in closed.items():
                self._write(name, before)

    def _write(self, name: str, value: Tensor) -> None:
        for tensors in (self.optimizer.masters, self.optimizer.working):
            local(tensors[name]).detach().copy_(value)

    def shift(self, masters: dict[str, Tensor], scale: float) -> None:
        """Add noise to these tensors, the same in every copy of a shard."""
        shift_tensors(self.optimizer, masters, scale)

    def unmoved(self, gradients: dict[str, Tensor]) -> list[str]:
        """Names of the trained tensors that a step with their gradients leaves as they are, or whose working weights
        are not their masters after it. The step is taken for some tensors at a time, which are then restored: that
        needs less memory than a real one."""
        optimizer, wrong = self.optimizer, []
        kept = {name: optimizer.gradients()[name] for name in gradients}
        for names in in_chunks({name: optimizer.masters[name].numel() for name in gradients}):
            optimizer.clear_gradients()
            optimizer.restore_gradients({name: kept[name] for name in names})
            before = {name: local(optimizer.masters[name]).detach().clone() for name in names}
            moved = {}
            try:
                optimizer.apply(max(optimizer.learning_rate, 1e-4))
                for name in names:
                    master, working = local(optimizer.masters[name]).detach(), local(optimizer.working[name]).detach()
                    same = torch.equal(working, master.to(working.device, working.dtype))
                    moved[name] = float(same and not torch.equal(master, before[name]))
            finally:
                for name in names:
                    self._write(name, before[name])
                    for found in optimizer.optimizers:
                        found.state.pop(optimizer.masters[name], None)
            wrong += [name for name, has_moved in self.largest(moved).items() if not has_moved]
        return wrong

    def with_effect(self, names: Sequence[str]) -> list[str]:
        """Those of these tensors that change the loss, by clearly more than it changes without."""
        if not names:
            return []
        losses = self.loss(), self.loss()  # sums of an accelerator may have another order each time
        limit = 10 * abs(losses[0] - losses[1]) + 1e-6 * abs(losses[0])
        changes = {}
        for name in names:
            before = local(self.optimizer.masters[name]).detach().clone()
            try:
                self.shift({name: self.optimizer.masters[name]}, 0.1)
                changes[name] = float(abs(self.loss() - losses[0]) > limit)
            finally:
                self._write(name, before)
        return [name for name, changed in self.largest(changes).items() if changed]


@torch.no_grad()
def shift_tensors(optimizer: Optimizer, masters: dict[str, Tensor], scale: float) -> None:
    """Add noise of `scale` times the size of a tensor's elements."""
    for name, master in masters.items():
        own = local(master)
        generator = torch.Generator().manual_seed(sum(name.encode()))
        noise = torch.randn(own.shape, generator=generator) * scale * (float(own.float().abs().mean()) or SIZE)
        own.add_(noise.to(own.device, own.dtype))
        local(optimizer.working[name]).copy_(own)


def in_chunks(sizes: dict[str, int], parts: int = 8) -> list[list[str]]:
    """The names in chunks of about 1 / parts of the whole."""
    chunks: list[list[str]] = []
    room = 0.0
    for name, size in sizes.items():
        if not chunks or size > room:
            chunks.append([])
            room = sum(sizes.values()) / parts
        chunks[-1].append(name)
        room -= size
    return chunks


def few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_update(trial: TrialUpdate) -> CheckResult:
    optimizer, model = trial.optimizer, trial.model
    frozen = {name: p for name, p in model.model.named_parameters() if name not in optimizer.working}
    with trial.restored(), trial.open_adapters():
        sums = {name: checksum_of(p) for name, p in frozen.items()}
        gradients = trial.gradients([trial.whole])
        sizes = {name: float(g.abs().max()) if g.numel() else 0.0 for name, g in gradients.items()}
        sizes = trial.largest({name: sizes.get(name, 0.0) for name in optimizer.working})
        silent = [name for name, size in sizes.items() if size == 0]
        infinite = [name for name, size in sizes.items() if not math.isfinite(size)]
        unmoved = [] if infinite else trial.unmoved({n: g for n, g in gradients.items() if n not in silent})
        changed = trial.largest({name: float(checksum_of(p) != sums[name]) for name, p in frozen.items()})
        moved = [name for name, has_moved in changed.items() if has_moved]
        # A tensor that the loss does not depend on has no gradient: an expert without tokens, or keys of a layer that
        # uses another layer's. What chooses need not weigh anything.
        lost = trial.with_effect([name for name in silent if not CHOOSES.search(name)][:PROBED])
    unused = [] if lost else silent
    moving = len(optimizer.working) - len(silent) - len(unmoved)
    tried = f"a trial step moved {moving} of {len(optimizer.working)} trained tensors and {len(moved)} of {len(frozen)}"
    tried += " frozen ones" + (f" (no tokens reach {few(unused)})" if unused else "")
    problem = ""
    if infinite:
        problem = f"the gradient of {few(infinite)} is not finite: check the weights of --pretrain and the data"
    elif lost:
        problem = f"{few(lost)} changes the loss and gets no gradient: something between it and the loss is detached"
    elif unmoved:
        problem = f"{few(unmoved)} has a gradient and does not move: the optimizer does not hold the weights in use"
    elif moved:
        problem = f"{few(moved)} should be frozen and moves"
    elif not optimizer.working:
        problem = "nothing is trained: check --target_modules"
    elif trial.fake and frozen and (left := sorted(frozen.keys() & trained_names(trial.fake().model))):
        problem = f"{few(left)} is frozen, though no option says so"
    elif tied := untied_head(model, trial.mesh):
        problem = tied
    return CheckResult("update", tried, problem)


def trained_names(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def checksum_of(tensor: Tensor) -> tuple[float, float]:
    own = local(tensor).detach()
    wide = own.float() if own.is_floating_point() else own.long()
    return float(wide.sum()), float(wide.abs().max()) if own.numel() else 0.0


def untied_head(model: PackedModel, mesh: Mesh) -> str:
    """Why the head is not the embedding although the configuration ties them; empty: it is right."""
    inner, config = model.inner, model.config.get_text_config()
    if not getattr(config, "tie_word_embeddings", False) or mesh.size > 1:
        return ""
    head, embedding = inner.get_output_embeddings(), inner.get_input_embeddings()
    if head is None or embedding is None or not isinstance(getattr(head, "weight", None), Tensor):
        return ""
    same = head.weight.data_ptr() == embedding.weight.data_ptr()
    return "" if same else "the head is a copy of the embedding that its configuration ties it to: they drift apart"


def check_micro_batches(trial: TrialUpdate) -> CheckResult | None:
    if trial.balanced:
        return None  # the balance of experts is that of a micro-batch
    whole = trial.whole
    alone: list[list[int] | None] = [[i] for i in whole]
    ways: dict[str, list[list[int] | None]] = {"rows with a filler": [*alone, None]}
    if len(whole) > 1:
        ways["2 rows"], ways["1 row"] = [whole[::2], whole[1::2]], [whole]
    with trial.restored(), trial.open_adapters():
        first = trial.gradients(alone)
        differences = {
            how: relative_difference(first, trial.gradients(parts), trial.mesh) for how, parts in ways.items()
        }
        how, largest = max(differences.items(), key=lambda found: found[1])
        tried = f"the gradient of {len(whole)} samples, each alone, with a filler, in 2 rows, in 1: differs by "
        tried += f"{largest:.1e}"
        limit = 0.15 if trial.bf16 or trial.optimizer.gradient_dtype == torch.bfloat16 else 1e-3
        again = lambda: relative_difference(first, trial.gradients(alone), trial.mesh)  # noqa: E731
        more, limit = with_rounding(trial, largest, limit, again)
    problem = (
        ""
        if largest <= limit
        else f"in {how} it is another gradient (limit {limit:.2g}): report this, or use another model"
    )
    return CheckResult("micro_batches", tried + more, problem)


def with_rounding(trial: TrialUpdate, found: float, limit: float, again: Callable[[], float]) -> tuple[str, float]:
    """Of a difference in bf16 beyond the limit: what the same work differs by when embeddings are rounded, in words,
    and the limit that follows."""
    if not (trial.bf16 and limit < found < math.inf):
        return "", limit
    with rounded_embeddings(trial.model):
        noise = again()
    return f", by {noise:.1e} when embeddings are rounded", max(limit, NOISE * noise if noise < math.inf else 0)


@contextlib.contextmanager
def rounded_embeddings(model: PackedModel) -> Iterator[None]:
    """Inside, embeddings are off by as much as bf16 rounds: what that changes, rounding alone may change. In a mixture
    whose experts are about equally likely that is a lot, as tokens go to others."""

    def rounded(_: torch.nn.Module, __: tuple, out: Tensor) -> Tensor:
        return out * (1 + torch.finfo(torch.bfloat16).eps * torch.randn_like(out, dtype=torch.float32)).to(out.dtype)

    hook = model.inner.get_input_embeddings().register_forward_hook(rounded)
    try:
        yield
    finally:
        hook.remove()


def relative_difference(first: dict[str, Tensor], second: dict[str, Tensor], mesh: Mesh) -> float:
    """Norm of the difference over the norm, of the shards of whichever process differs most."""
    size = math.sqrt(sum(float(g.float().square().sum()) for g in first.values()))
    missing = first.keys() ^ second.keys()
    gaps = ((first[n].float() - second[n].float()).square().sum() for n in first.keys() & second.keys())
    gap = math.inf if missing else math.sqrt(sum(map(float, gaps)))
    return largest(mesh.all.gather(gap / max(size, 1e-12)))


def largest(values: Iterable[float]) -> float:
    """Infinity, if one is no number."""
    return max(math.inf if math.isnan(value) else value for value in values)


def check_neighbours(trial: TrialUpdate) -> CheckResult | None:
    if len(trial.whole) < 2:
        return None
    with trial.restored(), scoring(trial.model):
        (together,), _ = trial.make([trial.whole])
        alone, _ = trial.make([[i] for i in trial.whole])
        row = trial.model.check_values(together).float()
        single = torch.cat([trial.model.check_values(batch).float() for batch in alone])

        def gap_to(values: Tensor) -> float:
            gaps = (values - single).abs()
            return largest(trial.mesh.all.gather(float(gaps.mean() if trial.bf16 else gaps.max())))

        gap = gap_to(row)
        limit = 0.1 if trial.bf16 else 1e-3 * max(1.0, float(single.abs().max()) / 10)
        tried = f"{len(trial.whole)} samples in one row and each alone: values differ by {gap:.1e}"
        again = lambda: gap_to(torch.cat([trial.model.check_values(batch).float() for batch in alone]))  # noqa: E731
        more, limit = with_rounding(trial, gap, limit, again)
    problem = (
        "" if gap <= limit else f"samples in a row see each other (limit {limit:.1e}): leave out --packing_samples"
    )
    return CheckResult("neighbours", tried + more, problem)


TRIALS: dict[str, tuple[int, Callable[[TrialUpdate], CheckResult | None]]] = {
    "update": (2, check_update),
    "micro_batches": (4, check_micro_batches),
    "neighbours": (1, check_neighbours),
}
"""Checks of an update: how many passes each takes, and the function."""


# ---- files, in `trimtab check` only


def compare_resumed(step: int, resumed: int, differing: Sequence[str], repeated: Sequence[str]) -> CheckResult:
    """`step`, `resumed`: before and after reading a checkpoint; then the tensors that were read back otherwise, and
    the tensors that the next step made otherwise."""
    tried = f"a checkpoint: {len(differing)} tensors read back otherwise, {len(repeated)} differ after the next step"
    problem = ""
    if step != resumed:
        problem = f"it was saved after step {step} and goes on after step {resumed}: report this"
    elif differing or repeated:
        problem = f"{few([*differing, *repeated])} is not what was saved: report this"
    return CheckResult("checkpoint", tried, problem)


def check_export(
    folder: Path, base: str, model: PackedModel, batch: TokenBatch, mesh: Mesh, *, bf16: bool
) -> CheckResult:
    """`folder`: the saved model, or an adapter on `base`, whose values plain transformers computes in one process.
    `bf16`: passes round to it; sharded weights may be fp32 all the same."""
    scores, gap, ids = isinstance(model, RewardModel), 0.0, batch.sequence(0)
    with scoring(model):
        single = TokenBatch.of([(ids.cpu().numpy(), np.ones(len(ids), dtype=bool))]).to(ids.device)
        ours, ids = model.check_values(single).float().cpu(), ids.cpu()
        if mesh.is_rank_zero:
            with own_heartbeat.waiting():  # the whole model, in main memory
                logits = load_plain(folder, base, scores=scores)(input_ids=ids[None]).logits[0].float()
            theirs = logits.view(-1)[-1:] if scores else logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            gap = float((ours - theirs).abs().mean())
    gap = mesh.all.gather(gap)[0]
    limit = 0.1 if bf16 else 1e-3
    problem = "" if gap <= limit else f"the exported model is another one (limit {limit:g}): report this"
    what = "scores" if scores else "log-probs"
    return CheckResult("export", f"the saved folder in plain transformers: {what} differ by {gap:.1e}", problem)


def load_plain(folder: Path, base: str, *, scores: bool) -> Any:
    """A saved model, or an adapter on `base`, as transformers and PEFT load it. A reward model's class may be one that
    Trimtab makes, and its head may have another name in the files."""
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    adapter = (folder / "adapter_config.json").exists()
    place, flag = (base, "--pretrain") if adapter else (str(folder), "--save_path")
    loader, more = AutoModelForCausalLM, dict[str, Any]()
    if scores:
        loader, more = AutoClassifier, {"num_labels": 1}
        head = getattr(from_pretrained(AutoConfig, place, flag=flag), "value_head_prefix", HEAD)
        if head != HEAD:
            more["key_mapping"] = {rf"^{head}\.": f"{HEAD}."}
    model = from_pretrained(loader, place, flag=flag, dtype=torch.float32 if adapter else "auto", **more)
    return (PeftModel.from_pretrained(model, str(folder)) if adapter else model).eval()
