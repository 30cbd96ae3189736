"""Distances to a teacher: values and gradients against sums written out, and against TRL's generalised JSD."""

import math
from itertools import pairwise

import pytest
import torch

from tests.algos.one_step import (
    STEP,
    answer_log_probs,
    assert_same_function,
    assert_same_step,
    assert_values_and_slopes,
    causal_lm,
    rows_of,
    step_of,
    values_and_slopes,
)
from tests.train.job_run import make_run, step_gradient, write_model, write_rows
from trimtab.algos.supervised_losses import divergence, forward_kl, jensen_shannon, reverse_kl
from trimtab.config.jobs import KDOptions
from trimtab.embedded.sort_task import make_rows, make_tokenizer, prompt_of, reference_of
from trimtab.errors import UserError
from trimtab.train.supervised_tasks import KDTask

STUDENT = [[0.2, -1.0, 2.0, 0.0], [3.0, 3.0, -4.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
TEACHER = [[1.0, 0.5, -0.5, 0.0], [-2.0, 5.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]


def probabilities(logits):
    total = sum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


def through_softmax(q, slopes):
    """From the derivative by each probability to the derivative by each logit."""
    mean = sum(a * b for a, b in zip(q, slopes))
    return [a * (b - mean) for a, b in zip(q, slopes)]


def plain_forward(q, p):
    return -sum(a * math.log(b) for a, b in zip(p, q)), [b - a for a, b in zip(p, q)]


def plain_reverse(q, p):
    value = sum(b * math.log(b / a) for a, b in zip(p, q))
    return value, through_softmax(q, [math.log(b / a) + 1 for a, b in zip(p, q)])


def plain_jsd(beta):
    def value_and_slopes(q, p):
        m = [beta * a + (1 - beta) * b for a, b in zip(p, q)]
        value = beta * sum(a * math.log(a / c) for a, c in zip(p, m))
        value += (1 - beta) * sum(b * math.log(b / c) for b, c in zip(q, m))
        # The derivatives of the mixture in both terms add up to a constant, which the softmax takes away.
        return value, through_softmax(q, [(1 - beta) * math.log(b / c) for b, c in zip(q, m)])

    return value_and_slopes


DISTANCES = {
    "forward_kl": (divergence("forward_kl"), plain_forward),
    "reverse_kl": (divergence("reverse_kl"), plain_reverse),
    "jsd": (divergence("jsd"), plain_jsd(0.5)),
    "jsd 0.1": (divergence("jsd", 0.1), plain_jsd(0.1)),
    "jsd 0.85": (divergence("jsd", 0.85), plain_jsd(0.85)),
}


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_equal_their_closed_forms(name):
    distance, plain = DISTANCES[name]
    values, slopes = zip(*(plain(probabilities(s), probabilities(t)) for s, t in zip(STUDENT, TEACHER)))
    assert_values_and_slopes(lambda student: distance(student, torch.tensor(TEACHER)), STUDENT, values, slopes)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_jsd_equals_trls(beta):
    from trl.experimental.gkd import GKDTrainer

    teacher = torch.tensor(TEACHER)
    assert_same_function(
        lambda student: jensen_shannon(student, teacher, beta).sum(),
        lambda student: GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, reduction="sum"),
        STUDENT,
    )


def test_at_its_ends_jsd_is_one_kl_divergence_and_near_them_it_tends_to_it():
    student, teacher = torch.tensor(STUDENT).double(), torch.tensor(TEACHER).double()
    teacher_entropy = forward_kl(teacher, teacher)
    ends = {0: forward_kl(student, teacher) - teacher_entropy, 1: reverse_kl(student, teacher)}
    for end, kl in ends.items():
        torch.testing.assert_close(jensen_shannon(student, teacher, float(end)), kl)
        gaps = []
        for small in (1e-3, 1e-4, 1e-5):
            beta = small if end == 0 else 1 - small
            gaps.append((jensen_shannon(student, teacher, beta) / small - kl).abs().max().item())
        assert all(later < earlier / 5 for earlier, later in pairwise(gaps)) and gaps[-1] < 0.002


def test_equal_distributions_have_distance_zero_and_no_gradient():
    for name in ("reverse_kl", "jsd"):
        found = values_and_slopes(lambda student: divergence(name)(student, torch.tensor(STUDENT)), STUDENT)  # noqa: B023
        torch.testing.assert_close(found, (torch.zeros(3), torch.zeros(3, 4)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_tokens_that_a_side_calls_impossible_leave_the_gradient_finite(name):
    logits = [[200.0, -200.0, 0.0], [-200.0, 200.0, 0.0]]
    _, slopes = values_and_slopes(lambda student: divergence(name)(student, torch.tensor(logits[::-1])), logits)
    assert slopes.isfinite().all()


# ---- a training step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kd")
    write_model(folder / "model")
    write_model(folder / "teacher", seed=1, hidden_size=64, num_hidden_layers=1)
    write_rows(folder / "train.jsonl", make_rows(8, seed=1))
    return folder


def ours(folder, words):
    words = f"{STEP} --input_key messages --apply_chat_template --teacher_model {folder}/teacher {words}"
    return step_gradient(make_run(KDOptions, KDTask, folder, words))


def sequences(folder):
    tokenizer = make_tokenizer()
    for row in rows_of(folder):
        prompt = tokenizer.encode(f"<user>{prompt_of(row)}<assistant>")
        yield torch.tensor(prompt + tokenizer.encode(reference_of(row) + "<eos>")), len(prompt)


def plain_step(folder, share, distance):
    """`distance` of the two models' logits at every position that predicts an answer's token, added up."""
    student, teacher = causal_lm(folder / "model"), causal_lm(folder / "teacher")
    nll, total, count = 0.0, 0.0, 0
    for ids, begin in sequences(folder):
        nll = nll - answer_log_probs(student, ids, begin).sum()
        with torch.no_grad():
            taught = teacher(input_ids=ids[None]).logits[0, begin - 1 : -1]
        total = total + distance(student(input_ids=ids[None]).logits[0, begin - 1 : -1], taught)
        count += len(ids) - begin
    return step_of(student, (1 - share) * nll / count + share * total / count)


def forward_sum(student, teacher):
    return -sum((t.exp() / t.exp().sum() * (s - s.logsumexp(0))).sum() for s, t in zip(student, teacher))


def reverse_sum(student, teacher):
    total = 0.0
    for s, t in zip(student, teacher):
        q, p = s.exp() / s.exp().sum(), t.exp() / t.exp().sum()
        total = total + (q * torch.log(q / p)).sum()
    return total


def jsd_sum(student, teacher):
    from trl.experimental.gkd import GKDTrainer

    return GKDTrainer.generalized_jsd_loss(student, teacher, beta=0.3, reduction="sum")


@pytest.mark.parametrize(
    "words, share, distance",
    [
        ("", 0.4, forward_sum),
        ("--kd_loss reverse_kl --kd_coef 0.7", 0.7, reverse_sum),
        ("--kd_loss jsd --jsd_beta 0.3 --kd_coef 1", 1.0, jsd_sum),
    ],
)
def test_a_step_equals_the_formula_over_its_tokens(folder, words, share, distance):
    """JSD by TRL's function, the others written out."""
    assert_same_step(ours(folder, words), plain_step(folder, share, distance))


def test_a_teacher_of_another_vocabulary_is_refused_in_one_line(folder, tmp_path):
    write_model(tmp_path / "teacher", vocab_size=len(make_tokenizer()) - 3)
    with pytest.raises(UserError, match=r"--teacher_model .*: its vocabulary .43 outputs. is not the student's .46."):
        ours(folder, f"--teacher_model {tmp_path}/teacher")
