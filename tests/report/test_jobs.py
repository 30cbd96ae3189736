"""Every job's page shows the job's own figures, and says what was trained from what on what."""

import json
import random

import pytest

from tests.report.pages import FIGURES, checked, page_of, scribble, write_run
from trimtab.report.charts import OBJECTIVES
from trimtab.report.comparison import write_comparison
from trimtab.report.run_data import read_run
from trimtab.report.summary import chosen_options, differing_options


@pytest.mark.parametrize("job", FIGURES)
def test_a_job_has_its_pictures_with_evaluation_and_nothing_unusual(job, tmp_path):
    page = page_of(write_run(tmp_path / "run", job))
    own = [picture for picture in OBJECTIVES.get(job, ()) if set(picture.metrics) & {*FIGURES[job], "reward_margin"}]
    # Loss, the job's own, four of pace; a reward model also has its histogram and its calibration.
    assert page.count("<figure") == 1 + len(own) + 4 + (2 if job == "rm" else 0)
    assert all(f"<b>{picture.title}</b>" in page for picture in own)
    evaluated = sum(len(picture.metrics) for picture in own) + 1
    assert page.count('<path class="dots c') == evaluated + page.count('class="whisker c0"')
    assert "Nothing unusual" in page and "Not recorded" not in page


@pytest.mark.parametrize(
    ("job", "options", "words"),
    [
        ("sft", {}, "the answers, token by token"),
        ("sft", {"pretrain_mode": "true"}, "every token of the text"),
        ("rm", {"loss": "logexp", "margin_loss": "true"}, "which of two answers is better (logexp loss, with margins)"),
        ("dpo", {"beta": 0.3}, "to prefer one answer to another: DPO, beta 0.3"),
        ("dpo", {"preference_loss": "dpo", "label_smoothing": 0.1}, "to prefer one answer to another: cDPO"),
        ("dpo", {"preference_loss": "simpo", "beta": 2}, "to prefer one answer to another: SimPO, beta 2"),
        ("kto", {"ref_pretrain": "other/model"}, "other/model"),
        ("kd", {"teacher_model": "big/teacher", "kd_loss": "reverse_kl"}, "big/teacher"),
        ("dpo", {}, "the model as it was at the start"),
        ("sft", {}, "390 rows of data/rows.jsonl"),
        ("dpo", {}, "390 pairs of data/rows.jsonl"),
        ("sft", {}, "all 1,000 parameters"),
    ],
)
def test_what_was_trained_is_said(job, options, words, tmp_path):
    assert f"<dd>{words}" in page_of(write_run(tmp_path / "run", job, **options))


def test_pairs_are_called_pairs_and_shared_tokens_are_counted(tmp_path):
    page = page_of(write_run(tmp_path / "run", "dpo"))
    assert "<td>tokens both sides begin with, read once</td><td>3,000 (33.3 %)</td>" in page
    assert "<td>pairs cut to the longest length</td><td>3 (0.8 %)</td>" in page
    assert "<td>length: longest</td><td>50</td>" in page


def test_the_margin_of_kto_is_the_difference_of_its_rewards(tmp_path):
    run = read_run(write_run(tmp_path / "run", "kto"))
    assert run.last("reward_margin") == pytest.approx(1.5) and run.last("eval_reward_margin") == pytest.approx(1.5)


def test_the_job_is_known_without_a_manifest(tmp_path):
    folder = write_run(tmp_path / "run", "kto")
    (folder / "manifest.json").unlink()
    assert read_run(folder).job == "kto" and "KL estimate" in page_of(folder)


def test_a_figure_nobody_foresaw_gets_a_picture_too(tmp_path):
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 41, "loss": 0.1, "aux_loss": 1.1, "entropy": 2.0, "eval_<b>": 1}) + "\n")
    page = page_of(folder)
    assert "<b>Entropy</b>" in page and "<b>Balance of the experts</b>" in page and "<b>&lt;b&gt;</b>" in page


def test_options_at_their_default_are_folded_away(tmp_path):
    folder = write_run(tmp_path / "run", "dpo", beta=0.1, learning_rate=1e-4, adam_betas="[0.9, 0.95]", max_epochs=2)
    assert set(chosen_options(read_run(folder))) == {"pretrain", "dataset", "learning_rate", "max_epochs"}
    page = page_of(folder)
    assert page.index("<dt>max_epochs</dt>") < page.index("The other 3 options") < page.index("<dt>adam_betas</dt>")


def test_an_unknown_job_or_option_counts_as_chosen(tmp_path):
    run = read_run(write_run(tmp_path / "run", brand_new=3, max_epochs=2))
    assert "brand_new" in chosen_options(run) and "max_epochs" not in chosen_options(run)
    run.job = "later"
    assert "max_epochs" in chosen_options(run)


def test_places_are_no_difference_between_runs(tmp_path):
    first = read_run(write_run(tmp_path / "a", "dpo", beta=0.1, seed=1))
    second = read_run(write_run(tmp_path / "b", "dpo", beta=0.3, seed=1))
    assert differing_options([first, second]) == ["beta"]


def test_rewards_of_an_earlier_job_in_the_folder_are_not_shown(tmp_path):
    folder = write_run(tmp_path / "run", "rm")
    assert "Calibration" in page_of(folder)
    (folder / "manifest.json").write_text('{"job": "sft"}')
    assert "Calibration" not in page_of(folder)


@pytest.mark.parametrize("job", FIGURES)
def test_files_cut_or_scribbled_over_at_any_place_still_give_a_page(job, tmp_path):
    dice = random.Random(job)
    folder = write_run(tmp_path / "run", job)
    other = write_run(tmp_path / "other", job)
    for _ in range(4):
        scribble(other, folder, dice)
        page_of(folder)
        checked(write_comparison([folder, other]).read_text())
