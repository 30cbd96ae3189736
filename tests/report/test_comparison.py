"""Several runs on one page."""

import re

import pytest

from tests.report.pages import checked, step_row, write_metrics, write_rl_run, write_run
from trimtab.report.comparison import columns_of, comparability, names_of, write_comparison
from trimtab.report.run_data import read_run


def compare(*folders) -> str:
    path = write_comparison(folders)
    assert path == folders[0] / "comparison.html"
    return checked(path.read_text())


def row_of(page: str, name: str) -> list[str]:
    (row,) = re.findall(rf"<tr><td>{name}</td>(.*?)</tr>", page)
    return re.findall(r"<td.*?</td>", row)


@pytest.fixture
def two(tmp_path):
    first = write_run(tmp_path / "first", "dpo", beta=0.1, learning_rate=1e-4)
    return first, write_run(tmp_path / "second", "dpo", steps=20, beta=0.3, learning_rate=1e-4)


def test_curves_lie_over_each_other_in_the_colours_of_their_runs(two):
    page = compare(*two)
    loss = page.split("<b>Loss</b>")[1].split("</figure>")[0]
    assert 'class="smooth c0"' in loss and 'class="smooth c1"' in loss and 'class="dots c1"' in loss
    assert '<span class="key smooth c0">first</span><span class="key smooth c1">second</span>' in loss
    assert "<b>Chosen reward</b>" in page and "<b>Reward margin</b>" in page


def test_final_figures_stand_side_by_side_and_the_best_is_marked(two):
    page = compare(*two)
    assert row_of(page, "steps") == ["<td>40</td>", "<td>20</td>"]
    assert row_of(page, "evaluation loss") == ["<td class=best>0.075</td>", "<td>0.15</td>"]
    assert row_of(page, "accuracy, evaluation") == ["<td>80 %</td>", "<td>80 %</td>"], "equal values have no best"
    assert row_of(page, "chosen reward, evaluation") == ["<td>0.5</td>", "<td>0.5</td>"]


def test_options_that_differ_are_told_from_those_in_common(two):
    page = compare(*two)
    assert row_of(page, "beta") == ["<td class=default>0.1</td>", "<td class=chosen>0.3</td>"]
    assert page.count("<td>learning_rate</td>") == 0 and "<dt>learning_rate</dt><dd>0.0001</dd>" in page
    assert "save_path" not in page


def test_a_warning_of_all_runs_is_said_once_and_of_one_with_its_name(two):
    for folder in two:
        (folder / "config.json").unlink()
    page = compare(*two)
    assert page.count("no saved model") == 1 and "<b>All runs</b>: There is no saved model" in page
    write_metrics(two[1], [])
    assert "<b>second</b>: No optimiser step is recorded yet." in compare(*two)


def test_what_cannot_be_compared_is_said(tmp_path):
    runs = [read_run(write_run(tmp_path / job, job)) for job in ("dpo", "sft")]
    assert list(comparability(runs)) == ["These runs are different jobs: their losses are not on one scale."]
    assert "class=best>0.075" not in compare(tmp_path / "dpo", tmp_path / "sft")
    other = read_run(write_run(tmp_path / "other", steps=20))
    other.manifest |= {"initial_weights": "def", "data": {"evaluation": {"rows_kept": 5}}}
    told = " ".join(comparability([runs[1], other]))
    assert "different weights" in told and "evaluated on different data" in told and "numbers of steps" in told
    assert list(comparability([runs[1], runs[1]])) == []


def test_names_are_as_short_as_they_can_be(tmp_path):
    folders = [write_run(tmp_path / place) for place in ("a/run", "b/run", "c/other")]
    assert names_of([read_run(folder) for folder in folders]) == ["a/run", "b/run", "c/other"]
    assert names_of([read_run(folder) for folder in folders[1:]]) == ["run", "other"]


def test_answers_to_the_same_prompt_stand_side_by_side(two):
    for folder, after in zip(two, ("12", "21")):
        (folder / "samples.json").write_text(
            f'[{{"prompt": "sort 21>", "before": "x", "after": "{after}", "reference": "12"}}, {{"prompt": "{after}"}}]'
        )
    table = compare(*two).split("Answers after training")[1]
    assert table.count("<tr>") == 2 and "class=right>12<" in table and "class=wrong>21<" in table


def test_nine_runs_and_broken_ones_still_give_a_page(tmp_path):
    folders = [write_run(tmp_path / f"run{index}", max_len=index + 1) for index in range(9)]
    (folders[3] / "metrics.jsonl").write_text("not json\n")
    (folders[4] / "options.yaml").write_text(": :")
    (folders[5] / "manifest.json").write_text("[")
    (folders[6] / "options.yaml").write_text("preference_loss: {a: [1]}\nmax_len: [1, {b: 2}]\n")
    page = compare(*folders)
    assert 'class="smooth c1 dashed"' in page and len(row_of(page, "max_len")) == 9


def test_command_writes_beside_the_first_run_or_where_output_says(two, tmp_path, trimtab):
    both = f"{two[0]} {two[1]}"
    for words, place in (
        (both, two[0] / "comparison.html"),
        (f"{both} --output {tmp_path}/new/both.html", tmp_path / "new/both.html"),
        (f"{both} --output {tmp_path}", tmp_path / "comparison.html"),
        (f"{two[0]} --output {tmp_path}/one/", tmp_path / "one/report.html"),
    ):
        assert trimtab(f"report {words}").said == f"{place}\n"
        assert place.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("first first", "is given twice"),
        ("first ./first/", "is given twice"),
        ("first nowhere", "no such folder"),
        ("first --output first/options.yaml/page.html", "cannot write the report"),
    ],
)
def test_a_mistake_is_one_line(words, problem, two, tmp_path, monkeypatch, trimtab):
    monkeypatch.chdir(tmp_path)
    assert problem in trimtab(f"report {words}").mistake


@pytest.fixture
def seeds(tmp_path):
    """Three seeds of one experiment whose final losses are 1, 2 and 3, and a run of another."""
    folders = [write_run(tmp_path / f"base-seed{seed}", seed=seed) for seed in (1, 2, 3)]
    for level, folder in enumerate(folders, start=1):
        write_metrics(folder, [step_row(step) | {"loss": float(level)} for step in range(1, 9)])
    return [*folders, write_run(tmp_path / "other", learning_rate=1.0, seed=1)]


def test_runs_that_differ_only_in_their_seed_are_one_column(seeds):
    columns = columns_of([read_run(folder) for folder in seeds])
    assert [column.label for column in columns] == ["base, 3 seeds", "other"]
    again = write_run(seeds[0].parent / "again", seed=1)
    assert len(columns_of([read_run(folder) for folder in (*seeds, again)])) == 3, "a repeated seed is no new one"


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (("1e-3-1", "1e-3-2", "1e-4-1", "1e-4-2"), ["1e-3, 2 seeds", "1e-4, 2 seeds"]),
        (("v1_s1", "v1_s2", "v2_s10", "v2_s11"), ["v1, 2 seeds", "v2, 2 seeds"]),
        (("a1/seed-1", "a1/seed-2", "a2/seed-1", "a2/seed-2"), ["a1, 2 seeds", "a2, 2 seeds"]),
        (("a1/1/run", "a1/2/run", "a2/1/run", "a2/2/run"), ["a1, 2 seeds", "a2, 2 seeds"]),
        (("1e-3", "1e-3-2", "1e-4", "1e-4-2"), ["1e-3, 2 seeds", "1e-4, 2 seeds"]),
        (("base-one", "base-two", "lr31", "lr32"), ["base, 2 seeds", "lr, 2 seeds"]),
        (("lr31", "lr32", "lr41", "lr42"), ["lr31 to lr32, 2 seeds", "lr41 to lr42, 2 seeds"]),
        (("lr31", "lr32", "lr", "lr-2"), ["lr31 to lr32, 2 seeds", "lr to lr-2, 2 seeds"]),
    ],
)
def test_experiments_over_seeds_are_told_apart(names, labels, tmp_path):
    rates = (1e-3, 1e-3, 1e-4, 1e-4)
    folders = [
        write_run(tmp_path / name, learning_rate=rate, seed=1 + i % 2)
        for i, (name, rate) in enumerate(zip(names, rates))
    ]
    assert [column.label for column in columns_of([read_run(folder) for folder in folders])] == labels


def test_seeds_show_their_mean_and_its_interval(seeds):
    page = compare(*seeds)
    # Student's t with 2 degrees of freedom: 4.303 x 1 / sqrt(3)
    assert row_of(page, "loss")[0] == "<td>2 ± 2.48</td>"
    assert row_of(page, "seed") == ["<td class=chosen>1, 2, 3</td>", "<td class=chosen>1</td>"]
    loss = page.split("<b>Loss</b>")[1].split("</figure>")[0]
    assert loss.count('class="band spread c0"') == 1 and 'class="smooth c0"' in loss
    assert "spread c1" not in page and "4 runs side by side" in page


def test_the_interval_of_a_curve_is_that_of_its_steps(seeds):
    column = columns_of([read_run(folder) for folder in seeds[:3]])[0]
    curve = column.curve(lambda run: run.series("loss"), "smooth", 0)
    assert [step for step, _ in curve.points] == list(range(1, 9)) and {value for _, value in curve.points} == {2.0}
    assert curve.high[3][1] - 2 == pytest.approx(2.484, abs=1e-3) == 2 - curve.low[3][1]


def test_a_best_mean_is_marked_only_where_intervals_are_apart(seeds):
    page = compare(*seeds)
    assert "class=best" not in "".join(row_of(page, "loss")), "the seeds' interval holds the other's loss"


def test_seeds_alone_make_a_page(seeds):
    page = compare(*seeds[:3])
    assert "3 runs side by side" in page and "base, 3 seeds" in page


def test_presets_of_one_job_show_the_option_that_they_preset(tmp_path):
    estimators = {"ppo": "gae", "grpo": "group_norm"}
    runs = [
        write_rl_run(tmp_path / job, job, advantage_estimator=estimator, seed=1)
        for job, estimator in estimators.items()
    ]
    page = write_comparison(runs).read_text()
    assert "<td>advantage_estimator</td><td class=default>gae</td><td class=default>group_norm</td>" in page
    assert "<td>save_path</td>" not in page
