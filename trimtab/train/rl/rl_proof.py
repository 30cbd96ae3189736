"""The checks of an RL run before its first iteration (train/proof.py): data, objective, update, engine.

They need answers of the policy: the engine samples a few short ones to the shortest prompts, as it does to compare its
log-probs with the trainer's (weight_sync.py). A run's own samples, random streams and weights stay as they are.
"""

import contextlib
import copy
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trimtab.data.chat_template import ChatRenderer
from trimtab.data.prompts import PromptDataset
from trimtab.data.rendering import as_messages
from trimtab.distributed.launcher import Group
from trimtab.distributed.process_group import World
from trimtab.errors import OutOfMemory, RunFailed
from trimtab.interrupts import StopRequest
from trimtab.models.policy import PolicyOutput
from trimtab.rewards.requests import make_reward_request
from trimtab.rewards.types import BadSample
from trimtab.rewards.verifiers import VERIFIERS, score_labels, verifiers_with_labels
from trimtab.rollout.sampling import SamplingParams, request_seed
from trimtab.train.checkpoint import Checkpoints
from trimtab.train.proof import (
    SAMPLES,
    SHORT,
    SLOW,
    TRIALS,
    Check,
    CheckResult,
    Proof,
    check_overlap,
    compare_resumed,
)
from trimtab.train.rl.checks import MANY_TRUNCATED
from trimtab.train.rl.experience import FINISHES, Experience
from trimtab.train.rl.files import learning_roles
from trimtab.train.rl.micro_batches import AnswerBatch, batches_of
from trimtab.train.rl.objective import policy_loss_term
from trimtab.train.rl.state import Iteration, UpdateTrial
from trimtab.train.rl.token_advantages import compute_advantages
from trimtab.train.run_directory import scratch_folder
from trimtab.train.update import ChecksTooLarge, InsufficientMemory, RebuildModels, memory_guard

LONGEST = 8  # tokens of a trial's answer
ANSWER = "An answer."
BARELY = 1e-5  # nats: no difference
SHIFTS = tuple(0.2 * 4**k for k in range(6))
"""Of the size of some weights, by which they are changed to see whether the engine follows, until log-probs clearly
change: by FAR nats a token, and ten times as much as engine and trainer round otherwise."""
FAR = 0.05
NEAR_ROWS = 512  # rows whose labels are compared with near prompts
LABELS = 8  # rows whose labels are tried
LONG = 5.0  # seconds of a batch's rewards that are no matter


def prompt_checks(
    options: Any, stores: dict[str, PromptDataset], reports: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Check]:
    """The checks that need no weights."""
    store = stores["train"]
    return {
        "data": lambda: check_rows(store) or check_overlap(reports.get("evaluation")),
        "rendering": lambda: check_prompt(store, tokenizer, as_chat=options.apply_chat_template),
        "reward": lambda: check_labels(store, options),
    }


def check_rows(store: PromptDataset) -> CheckResult | None:
    """A problem, if tokens and columns of a row are those of two rows."""
    for i in {0, len(store) // 2, len(store) - 1}:
        own, text = prompt_text(store, i), store.text(i)
        others = [prompt_text(store, j) for j in (i - 1, i + 1) if 0 <= j < len(store)]
        if own not in text and any(other and other in text and other not in own for other in others):
            wrong = f"{store.place(i)}: its prompt is read with the columns of another row: report this"
            return CheckResult("data", f"the rows of {len(store):,} prompts", wrong)
    labels = [store.label(i) for i in range(min(len(store), NEAR_ROWS))]
    if blank := sum(isinstance(label, str) and not label.strip() for label in labels):
        wrong = f"{blank} of {len(labels)} are empty: look at the column of --label_key"
        return CheckResult("data", f"the labels of {len(labels):,} prompts", wrong, warning=True)
    if (by := labels_shifted(store)) is not None:
        wrong = f"they look like those of the row {'after' if by > 0 else 'before'}: look at the column of --label_key"
        return CheckResult("data", f"the labels of {len(store):,} prompts", wrong, warning=True)
    return None


def labels_shifted(store: PromptDataset) -> int | None:
    """1 or -1 if labels share clearly more characters with the prompt of the row after or before than with their own or
    any other near row."""
    known = [(Counter(prompt_text(store, i)), store.label(i)) for i in range(min(len(store), NEAR_ROWS))]
    rows = [(prompt, Counter(str(label))) for prompt, label in known if label is not None]

    def shared(by: int) -> np.ndarray:
        pairs = ((rows[(i + by) % len(rows)][0], label) for i, (_, label) in enumerate(rows))
        return np.array([(prompt & label).total() for prompt, label in pairs])

    found = {by: shared(by) for by in (0, 1, -1, 2, -2)} if len(rows) > 5 else {}
    for by in (1, -1) if found else ():
        signs = [np.sign(found[by] - other) for shift, other in found.items() if shift != by]
        if all(sign.sum() >= 2.5 * math.sqrt(max(np.abs(sign).sum(), 1)) for sign in signs):
            return by
    return None


def prompt_text(store: PromptDataset, index: int) -> str:
    prompt = store.prompt(index)
    content = prompt if isinstance(prompt, str) else prompt[-1].get("content")
    return content.strip() if isinstance(content, str) else ""


def check_prompt(store: PromptDataset, tokenizer: PreTrainedTokenizerBase, *, as_chat: bool) -> CheckResult:
    """Look at the first prompt: an answer must follow it directly, and no special token may be doubled."""
    ids, text, prompt = store.ids(0), store.text(0), store.prompt(0)
    tried = f"the first prompt, {len(ids)} tokens, before an answer"
    first = tokenizer.bos_token_id
    if first is not None and ids[:2] == [first, first]:
        wrong = f"it begins with {tokenizer.bos_token} twice: leave it out of the template or of the data"
        return CheckResult("rendering", tried, wrong)
    if as_chat or not isinstance(prompt, str):
        messages, renderer = as_messages(prompt, "user"), ChatRenderer(tokenizer)
        try:
            whole = renderer.render_text([*messages, {"role": "assistant", "content": ANSWER}])
            ignored = renderer.render_text(messages) == renderer.render_prompt(messages)
        except Exception:  # a template may want tools or columns that are not known here
            return CheckResult("rendering", tried)
        header = whole[len(text) : whole.find(ANSWER)] if whole.startswith(text) and ANSWER in whole else ""
        # Behind a generation prompt, what stands before the answer is for the model to write: an empty thought.
        if ignored and header.strip():
            wrong = f"the template puts {header!r} before an answer, and the prompt ends without: it ignores "
            return CheckResult("rendering", tried, f"{wrong}add_generation_prompt; mend --tokenizer_chat_template")
    return CheckResult("rendering", tried)


def check_labels(store: PromptDataset, options: Any) -> CheckResult | None:
    """Verifiers must score the labels of some rows as right."""
    asked = verifiers_with_labels(options.reward_verifier) if options.reward_verifier and not options.replay else []
    names = [name for name in asked if VERIFIERS[name].answers]
    if not names:
        return None
    rows = sorted({i * (len(store) - 1) // (LABELS - 1) for i in range(LABELS)})
    tried = f"the labels of {len(rows)} rows as answers, scored by {', '.join(names)}"
    for name in names:
        if rejected := label_problems(store, rows, name):
            # A label may be out of the verifier's reach, as a proof is for math.
            most = len(rejected) > len(rows) / 2
            wrong = f"{rejected[0]} ({len(rejected)} of {len(rows)} such rows), so no answer can be right: "
            return CheckResult("reward", tried, f"{wrong}mend the labels, or use another --reward_verifier", not most)
    return CheckResult("reward", tried)


def label_problems(store: PromptDataset, rows: list[int], name: str) -> list[str]:
    """Why the verifier gives the labels of some rows, as answers, less than its best score."""
    empty: list[list[int]] = [[] for _ in rows]
    request = make_reward_request(store, rows, [""] * len(rows), empty, empty)
    try:
        scores = score_labels(name, request)
    except BadSample as error:  # of one of them
        if len(rows) > 1:
            return [problem for row in rows for problem in label_problems(store, [row], name)]
        return [f"{store.place(rows[0])}: {error}"]
    return [
        f"{store.place(rows[i])}: {name} gives {score:g} for the label {request.truth(i)!r:.80}"
        for i, score in enumerate(scores)
        if score < VERIFIERS[name].best
    ]


def prove_rl(run: Any, reports: dict[str, Any]) -> None:
    """Run the checks of an RLRun that precede the first iteration. UserError: one has failed."""
    options = run.options
    proof = Proof(options, lambda line: print(line, flush=True))
    proof.run(prompt_checks(options, run.client.stores, reports, run.client.tokenizer))
    names = [name for name in (*TRIALS, "objective", "engine") if options.wants_check(name)]
    alone = all(len(group.ranks) == 1 for group in (*run.roles.trainers, run.roles.rollouts))
    if not run.has_objective:
        names = [name for name in names if name != "objective"]
    if names:
        limit = copy.copy(run.batcher.limit)
        try:
            with memory_guard():
                try_roles(run, proof, names, alone=alone)
        except (OutOfMemory, InsufficientMemory, RebuildModels) as error:  # the run finds micro-batches that fit
            run.batcher.limit = limit
            proof.leave_out(names, SHORT)
            if isinstance(error, OutOfMemory):  # after the others that is done
                run.roles.actor.reinit_process_group()
            if not alone:  # sharded models must be rebuilt
                proof.conclude()
                if options.check_only:
                    return
                raise ChecksTooLarge from None
    if options.check_only:
        try:
            try_iteration(run, proof)
        except RebuildModels:  # of several processes: a run rebuilds them and goes on with smaller micro-batches
            proof.leave_out(["reward", "checkpoint", "export"], SHORT)
    proof.conclude()


def try_roles(run: Any, proof: Proof, names: list[str], *, alone: bool) -> None:
    began = time.monotonic()
    few = few_answers(run)
    run.batcher.fill(few, "old_N", run.roles.actor, "log_probs")
    scored = time.monotonic() - began
    if "objective" in names:
        proof.run({"objective": lambda: check_objective(few, run)})
    trials, seconds, planned = [name for name in TRIALS if name in names], 0.0, planned_passes(run, few)
    for tried in run.trials(with_advantages(run, few)) if trials else ():
        seconds = proof.try_update(trials, partial(run_trial, tried), planned)
    if "engine" not in names:
        return
    # Two transfers of weights, and samples scored a few times. Out of memory inside, several processes could not
    # restore their weights: only the loop rebuilds them.
    if not alone and not run.options.check_only:
        proof.leave_out(["engine"], "several processes; trimtab check runs it")
    elif proof.has_time(2 * (scored + run.weight_sync.seconds), planned * seconds):
        proof.run({"engine": lambda: check_engine(run, few)})
    else:
        proof.leave_out(["engine"], SLOW)


def try_iteration(run: Any, proof: Proof) -> None:
    """What a run does with its first batch, and its files. The run cannot train afterwards."""
    if not run.options.replay:
        proof.run({"reward": lambda: check_first_batch(run)})
    if any(result.failed for result in proof.results):
        return  # a batch that has failed would fail again
    weights = 4 * sum(role.call("describe")[0].get("parameters", 0) for role in run.roles.trainers)
    state = sum(role.call("state_bytes")[0] for role in learning_roles(run.roles).values())
    with scratch_folder(run.options, state + weights, World()) as folder:
        if folder is None:
            proof.leave_out(["checkpoint", "export"], "no room on the disk of --ckpt_path")
        else:
            run.files.checkpoints = Checkpoints(folder / "checkpoints", keep=1, keep_gib=1e9)
            files = {"checkpoint": check_resumed, "export": check_exported}
            proof.run({name: partial(check, run, folder / "model") for name, check in files.items()})


def planned_passes(run: Any, few: Experience) -> float:
    """The run as a multiple of a pass over these answers."""
    options, lengths = run.options, run.client.stores["train"].lengths
    answers = run.files.total * options.rollout_batch_size * options.n_samples_per_prompt
    return answers * (float(lengths.mean()) + options.generate_max_len / 2) / len(few.ids_T)


def few_answers(run: Any) -> Experience:
    """Short answers to the shortest prompts, two to each, with made-up rewards."""
    options, store = run.options, run.client.stores["train"]
    rows = store.lengths.argsort(kind="stable")[: SAMPLES // 2].tolist()
    prompts = [store.ids(row) for row in rows for _ in range(2)]
    sampling = SamplingParams(max_new_tokens=min(LONGEST, options.generate_max_len), temperature=options.temperature)
    seeds = [request_seed(options.seed, i) for i in range(len(prompts))]
    found: Experience = run.roles.rollouts.call("probe", prompts=prompts, seeds=seeds, sampling=sampling)[0]
    found.groups_S = torch.arange(len(found)) // 2
    found.finishes_S = torch.full_like(found.finishes_S, FINISHES.index("stop"))
    found.rewards_S = found.scores_S = torch.tensor([1.0, 0.0, 0.2, 0.7])[: len(found)]
    return found


def with_advantages(run: Any, few: Experience) -> Experience:
    """These answers with made-up advantages, and what updates need besides."""
    signs_N = torch.tensor([1.0, -0.5])[few.owners_N % 2]
    made = dataclasses.replace(few, advantages_N=signs_N, values_N=torch.zeros_like(signs_N), returns_N=signs_N)
    if run.roles.reference is not None:
        assert few.old_N is not None
        made.reference_N = few.old_N - 0.1
    return made


def run_trial(trial: UpdateTrial, name: str | None) -> tuple[CheckResult | None, float]:
    """Run this one of proof.TRIALS in the trainer's processes."""
    settings = {"columns": trial.columns, "name": name, **trial.settings}
    found = trial.role.call("try_update", experience=trial.experience, **settings)[0]
    return found["result"] and CheckResult(**found["result"]), found["seconds"]


# ---- the objective


def check_objective(few: Experience, run: Any) -> CheckResult:
    """Properties of advantages and loss that hold for every estimator and loss."""
    # What is known of rewards here: they are made up, and of answers of a few tokens.
    options = dataclasses.replace(run.options, reward_clip_range=(-math.inf, math.inf), overlong_buffer_len=None)
    problem = ""

    def advantages(rewards: Tensor, reference_N: Tensor | None = None, coefficient: float = 0.0) -> Tensor:
        made = dataclasses.replace(few, rewards_S=rewards, reference_N=reference_N)
        made.values_N = torch.zeros_like(few.sampled_N)
        compute_advantages(made, options, coefficient)
        assert made.advantages_N is not None
        sums = torch.zeros(len(few)).index_add(0, few.owners_N, made.advantages_N)
        return sums / few.lengths_S.clamp(min=1)

    plain = advantages(few.rewards_S)
    if options.estimator.grouped:
        second = torch.tensor([0.0, 0.0, 0.5, 0.5])[: len(few)]
        moved = float((advantages(few.rewards_S - second) - plain).abs().max())
        if moved > 1e-4:
            problem = (
                f"a reward that all answers to a prompt get moves advantages by {moved:.2g}: not compared by prompt"
            )
    if not problem and not plain[0] > plain[1]:
        problem = f"the better of two answers has the advantage {float(plain[0]):.2g}, the worse {float(plain[1]):.2g}"
    far_N = few.old_N - (few.owners_N == 0).float()  # the first answer is likelier than under the reference
    if not problem and run.roles.reference is not None and not options.use_kl_loss:
        pulled = advantages(torch.zeros(len(few)), far_N, 0.1)
        if not pulled[0] < pulled[1:].min():
            problem = "KL to the reference raises the advantage of an answer: its sign is wrong"
    if not problem:
        problem = loss_problem(few, far_N, run)
    tried = f"advantages ({options.advantage_estimator}) and loss of {len(few)} answers with made-up rewards"
    return CheckResult("objective", tried, f"{problem}; report this" if problem else "")


def loss_problem(few: Experience, far_N: Tensor, run: Any) -> str:
    """What is wrong with the direction in which the loss moves log-probs; empty: nothing."""
    left_out = {"aux_loss_coef": 0.0, "entropy_loss_coef": None, "entropy_target": None, "kl_clip": None}
    options = dataclasses.replace(run.options, policy_loss_coef=1.0, **left_out)

    def slope(advantages_N: Tensor, reference_N: Tensor | None, coefficient: float) -> float:
        """Derivative of the loss by the log-probs of the policy that sampled, along the signs of the advantages."""
        # Old log-probs are the sampled ones, so that ratios are 1: a narrow clip leaves no room for rounding.
        made = dataclasses.replace(few, advantages_N=advantages_N, reference_N=reference_N, old_N=few.sampled_N)
        parts, totals = run.batcher.policy_update(run.roles.actor, made, list(range(len(few))), 0)
        total = 0.0
        for batch in batches_of(parts[0][:1]):
            log_probs_N = batch.extra["sampled_N"].clone().requires_grad_()
            assert isinstance(batch, AnswerBatch)
            signs_N = batch.extra["advantages_N"].sign()
            policy: Any = partial(lambda found, *_, **__: found, PolicyOutput(log_probs_N))
            policy_loss_term(policy, batch, totals, options, kl_coefficient=coefficient).loss.backward()
            total += float((log_probs_N.grad * signs_N).sum())
        return total

    if not slope(torch.tensor([1.0, -1.0])[few.owners_N % 2], None, 0.0) < 0:
        return "the loss lowers the log-probs of answers with positive advantages"
    pulls = options.use_kl_loss and run.roles.reference is not None
    if pulls and not slope(torch.full_like(few.sampled_N, 1e-12), far_N, 1.0) > 0:
        return "the KL loss drives the policy away from the reference"
    return ""


# ---- engine and reference


@contextlib.contextmanager
def shifted_weights(run: Any, changed: Callable[[], float], wanted: float) -> Iterator[float]:
    """Inside, some of the policy's weights are others, in the engines too: by so much that log-probs have `changed` by
    `wanted`, if they change at all. Yields by how much."""
    sync, check, change = run.weight_sync, run.weight_sync.check, 0.0
    try:
        for scale in SHIFTS:
            run.roles.actor.call("shift_weights", scale=scale)
            change = changed()
            if change >= wanted:
                break
        sync.check = None  # its limits are those of a sound model
        run.sync_weights()
        yield change
    finally:
        sync.check = check
        run.roles.actor.call("unshift_weights")
        run.sync_weights()


def check_engine(run: Any, before: Experience) -> CheckResult | None:
    """Change the policy: the engine's log-probs must follow the trainer's, and the reference's must stay."""
    if run.options.replay:
        return None

    def scored(experience: Experience, role: Group) -> Tensor:
        made = dataclasses.replace(experience, old_N=None)
        run.batcher.fill(made, "old_N", role, "log_probs")
        assert made.old_N is not None
        return made.old_N

    def gap(first_N: Tensor, second_N: Tensor) -> float:
        found = float((first_N - second_N).abs().mean())
        return math.inf if math.isnan(found) else found

    reference = run.roles.reference
    kept_N = None if reference is None else scored(before, reference)
    start, problem = gap(scored(before, run.roles.actor), before.sampled_N), ""
    try:
        wanted = max(FAR, 10 * start)
        with shifted_weights(run, lambda: gap(scored(before, run.roles.actor), before.old_N), wanted) as change:
            after = few_answers(run)
            later = gap(scored(after, run.roles.actor), after.sampled_N)
            moved = 0.0 if reference is None else gap(scored(before, reference), kept_N)
    except RunFailed as error:  # of the comparison after a sync
        return CheckResult("engine", "a change of the weights, sent to the engine", str(error))
    if not all(map(math.isfinite, (start, change, later, moved))):
        problem = "log-probs are not finite: check the weights of --pretrain"
    elif change <= BARELY:
        problem = "the trainer's log-probs do not change with its weights"
    elif change >= wanted and later > max(3 * start, change / 4):
        problem = "the engine samples from older weights, or an older adapter: use another --rollout_engine"
    elif moved > BARELY:
        problem = f"the reference changes with the policy, by {moved:.1e}: the KL would always be 0"
    tried = f"a change of {change:.1e} nats a token: engine and trainer differ by {later:.1e} ({start:.1e} before)"
    return CheckResult("engine", tried, problem)


def first_batch(run: Any) -> Iteration | None:
    """Sample and score the first batch. Nothing can be trained afterwards."""
    if run.iteration is None:
        with StopRequest() as stop:
            run.iteration = run.begin(stop)
    return run.iteration


def check_first_batch(run: Any) -> CheckResult:
    try:
        work = first_batch(run)
    except RunFailed as error:  # of a reward or an environment
        return CheckResult("reward", "the first batch", str(error))
    if work is None:
        return CheckResult("reward", "the first batch", "no prompt of it is useful: look at --dynamic_filtering", True)
    rewards_S, cut, rollout = work.experience.rewards_S, work.figures["truncated"], work.seconds["rollout"]
    seconds, share = (max(found) for found in zip(*run.roles.rollouts.call("reward_clock")))
    low, high, finite = float(rewards_S.min()), float(rewards_S.max()), bool(rewards_S.isfinite().all())
    tried = f"{len(rewards_S)} answers, rewards {low:g} to {high:g}, in {seconds:.1f} s of a rollout of {rollout:.1f} s"
    equal = low == high and not run.options.is_taught
    problems = {
        "a reward is not finite": not finite,
        f"all {len(rewards_S)} answers get {low:g}: there is nothing to learn from": equal,
        f"{cut:.0%} of the answers end at --generate_max_len: raise it": cut > MANY_TRUNCATED,
        f"a call took {share:.0%} of the time that it may: raise --reward_timeout": share > 0.5,
        "the engine waits for the reward: make it faster, or give --async_train": seconds > max(LONG, 0.75 * rollout),
    }
    return CheckResult("reward", tried, "; ".join(text for text, wrong in problems.items() if wrong), warning=finite)


# ---- files


def check_resumed(run: Any, folder: Path) -> CheckResult | None:
    """Save after an update and go on; then resume and repeat."""
    work = first_batch(run)
    if work is None or run.options.disable_ds_ckpt:
        return None
    batches = run.mini_batches(work)

    def unlike_files() -> list[str]:
        return [f for n, role in saved.items() for part in role.call("differing_state", folder=path / n) for f in part]

    with StopRequest() as stop:
        run.before_updates(work, stop)
    run.update(work, batches[0])
    path, saved = run.files.save(run.checkpoint(), export=False), learning_roles(run.roles)
    wrong = unlike_files()
    step = run.counters.actor_steps
    run.update(work, batches[-1])
    for role in saved.values():
        role.call("keep_state", name="next")
    run.resume(ahead=False)
    wrong, resumed = [*wrong, *unlike_files()], run.counters.actor_steps
    run.update(run.iteration, batches[-1])
    repeated = [f for role in saved.values() for part in role.call("differing_state", name="next") for f in part]
    # Kernels of an accelerator may sum in another order.
    return compare_resumed(step, resumed, wrong, [] if run.on_accelerator else repeated)


def check_exported(run: Any, folder: Path) -> CheckResult | None:
    """The policy as --save_path would hold it, read by transformers."""
    if run.options.load_in_4bit:
        return None
    store = run.client.stores["train"]
    ids = store.ids(int(store.lengths.argmin()))
    found = run.roles.actor.call("try_export", folder=folder, ids=[*ids, *ids])[0]  # one token has no log-prob
    return CheckResult(**found)
