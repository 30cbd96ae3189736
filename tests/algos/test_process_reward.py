"""Step rewards: losses and gradients against the formulas written out; no other tool here has them in this form."""

import math

import pytest
import torch

from tests.algos.one_step import STEP, assert_same_step, assert_values_and_slopes, causal_lm, rows_of, step_of
from tests.byte_tokenizer import byte_tokenizer
from tests.train.job_run import make_run, step_gradient, step_rows, write_model, write_rows
from trimtab.algos.supervised_losses import hard_step_loss, soft_step_loss
from trimtab.config.jobs import PRMOptions
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.train.supervised_tasks import PRMTask

LOGITS = [[0.3, -1.2], [4.0, 1.0], [-30.0, 30.0], [0.0, 0.0]]


def log_softmax(row):
    total = math.log(sum(math.exp(x) for x in row))
    return [x - total for x in row]


def test_the_hard_loss_equals_its_closed_form():
    labels = [0, 1, 0, 1]
    values = [-log_softmax(row)[k] for row, k in zip(LOGITS, labels)]
    slopes = [[math.exp(p) - (j == k) for j, p in enumerate(log_softmax(row))] for row, k in zip(LOGITS, labels)]
    labels = torch.tensor(labels, dtype=torch.float32)
    assert_values_and_slopes(lambda x: hard_step_loss(x.log_softmax(-1), labels), LOGITS, values, slopes)


def test_the_soft_loss_equals_its_closed_form_and_the_hard_one_at_its_ends():
    positive = [0.8, 0.0, 1.0, 0.35]
    values, slopes = [], []
    for row, q in zip(LOGITS, positive):
        p = log_softmax(row)
        values.append(-(q * p[0] + (1 - q) * p[1]))
        slopes.append([math.exp(p[0]) - q, math.exp(p[1]) - (1 - q)])
    soft = lambda x: soft_step_loss(x.log_softmax(-1), torch.tensor(positive))  # noqa: E731
    assert_values_and_slopes(soft, LOGITS, values, slopes)
    hard = hard_step_loss(torch.tensor(LOGITS).log_softmax(-1), torch.tensor([1, 1, 0, 0]))
    torch.testing.assert_close(soft(torch.tensor(LOGITS))[1:3], hard[1:3])


def run_of(folder, labels, words, padded_vocabulary=0):
    write_model(folder / "model", vocab_size=len(make_tokenizer()) + padded_vocabulary)
    write_rows(folder / "train.jsonl", step_rows(8, labels))
    return make_run(PRMOptions, PRMTask, folder, f"{STEP} --placeholder_token ? {words}")


def plain_step(folder, choices, target_of):
    """`target_of` a label: the weights of `choices`, tokens or None for all the model knows."""
    model, tokenizer = causal_lm(folder / "model"), make_tokenizer()
    losses, right = [], 0
    for row in rows_of(folder):
        ids = torch.tensor(tokenizer.encode(row["input"]))
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        ends = [t for t in range(len(ids)) if tokenizer.decode(ids[t]) == "?"]
        assert len(ends) == len(row["label"])
        for t, label in zip(ends, row["label"]):
            scores = logits[t] if choices is None else logits[t][tokenizer.convert_tokens_to_ids(choices)]
            losses.append(-sum(q * (scores[k] - scores.logsumexp(0)) for k, q in target_of(label).items()))
            best = max(target_of(label), key=target_of(label).get)
            right += int(scores.argmax()) == best
    return step_of(model, sum(losses) / len(losses)), right / len(losses)


TWO, THREE = "--reward_tokens y n", "--reward_tokens a b c"
CASES = {
    "signs": (["+", "-", "-"], TWO, {"+": {0: 1.0}, "-": {1: 1.0}}),
    "numbers": ([1, 0, 0], TWO, {1: {0: 1.0}, 0: {1: 1.0}}),
    "soft": ([0.9, 0.0, 0.3], TWO, {q: {0: q, 1: 1 - q} for q in (0.9, 0.0, 0.3)}),
    "three": (["a", "c", "b", "c"], THREE, {"a": {0: 1.0}, "b": {1: 1.0}, "c": {2: 1.0}}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_among_reward_tokens_equals_the_formula_over_its_placeholders(tmp_path, name):
    labels, words, targets = CASES[name]
    run = run_of(tmp_path, labels, words)
    assert run.task.store.soft == (name == "soft")
    expected, accuracy = plain_step(tmp_path, words.split()[1:], targets.get)
    found = step_gradient(run)
    assert_same_step(found, expected)
    assert found[1]["accuracy"] == pytest.approx(accuracy)


def test_without_reward_tokens_a_step_is_taken_over_all_that_the_model_can_say(tmp_path):
    """Also over outputs that no token of the tokenizer has, as in models whose vocabulary is rounded up."""
    run = run_of(tmp_path, ["y", "n", "n"], "", padded_vocabulary=5)
    y, n = make_tokenizer().convert_tokens_to_ids(["y", "n"])
    expected, _ = plain_step(tmp_path, None, {"y": {y: 1.0}, "n": {n: 1.0}}.get)
    assert_same_step(step_gradient(run), expected)


def test_reward_tokens_are_the_tokens_that_the_tokenizer_makes_of_them(tmp_path):
    """A byte-level tokenizer has no token called "ки": it is made of bytes that have names of their own."""
    tokenizer = byte_tokenizer(["ки", "да"] * 9, ["<eos>"], 300, eos_token="<eos>")
    write_model(tmp_path / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", [{"input": "1+1=2?so 2?", "label": ["ки", "да"]}])
    run = make_run(PRMOptions, PRMTask, tmp_path, "--placeholder_token ? --reward_tokens ки да")
    assert run.task.choices(run.model) == [tokenizer.encode("ки")[0], tokenizer.encode("да")[0]]
