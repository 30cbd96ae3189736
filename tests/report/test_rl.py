"""The page about an RL run: what it achieved, its curves, where its time went, its answers; whole, cut or odd."""

import json
import random
import re

import pytest

from tests.report import pages
from tests.report.pages import checked, page_of, rl_evaluation, rl_row, write_lines, write_metrics, write_rl_run
from trimtab.config import jobs
from trimtab.report.charts import objective_panels
from trimtab.report.comparison import comparability, write_comparison
from trimtab.report.rollouts import best_and_worst, edges_of
from trimtab.report.run_data import RL_JOBS, read_run
from trimtab.report.summary import job_name


def test_every_rl_job_has_the_page_of_one():
    found = [kind for kind in vars(jobs).values() if isinstance(kind, type) and issubclass(kind, jobs.RLOptions)]
    assert {kind.verb for kind in found if hasattr(kind, "verb")} == set(RL_JOBS)


def figure_of(page: str, title: str) -> str:
    (found,) = [part for part in page.split("<figure")[1:] if f"<b>{title}</b>" in part]
    return found.split("</figure>")[0]


@pytest.fixture
def run(tmp_path):
    return write_rl_run(tmp_path / "run", n_samples_per_prompt=8, rollout_batch_size=16, generate_max_len=10)


def change(folder, edit) -> None:
    """Let `edit` change every row of training."""
    rows = read_run(folder).rows
    for row in rows:
        if row["step"]:
            edit(row)
    write_metrics(folder, rows)


def test_a_healthy_run_says_what_it_achieved_and_nothing_unusual(run):
    page = page_of(run)
    assert (
        "Held-out success rose from 27 % to 94 % (95 % interval 90 % to 96 %) and the mean reward rose from 0.268 to "
        "0.924 (mean of the last 4) in 40 iterations" in page
    )
    assert "390 prompts of data/prompts.jsonl · 40 iterations" in page
    assert "Nothing unusual" in page and "Not recorded" not in page
    assert "<dt>held-out success</dt><dd>94 %</dd><dd>from 27 %; 95 %: 90 % to 96 %</dd>" in page
    assert "<dt>best of 4 answers</dt><dd>98 %</dd><dd>from 55 %</dd>" in page
    assert "<dd>16 prompts, 8 answers each of up to 10 tokens" in page and "<dd>the file reward.py</dd>" in page
    assert "<td>prompts kept</td><td>390 (97.5 %)</td><td>390 (97.5 %)</td>" in page


@pytest.mark.parametrize("job", RL_JOBS)
def test_every_job_has_its_pictures_and_each_number_at_most_one(job, tmp_path):
    folder = write_rl_run(tmp_path / "run", job)
    page = page_of(folder)
    titles = re.findall(r"<figcaption><b>(.*?)</b>", page)
    wanted = ["Held-out success", "Reward", "Parts of the reward", "KL to the reference", "Entropy", "Clip fraction"]
    wanted += ["Answer length", "One iteration", "Over the run", "Tokens a second"]
    assert set(wanted) <= set(titles) and len(titles) == len(set(titles))
    assert ("Explained variance" in titles) == (job == "ppo") == ("Critic loss" in titles)
    drawn = [metric for picture in objective_panels([read_run(folder)]) for metric in picture.metrics]
    assert len(drawn) == len(set(drawn)) and "score" not in drawn, "a score that is the reward needs no curve"


def test_success_is_drawn_from_before_training_and_by_source(run):
    page = page_of(run)
    success = figure_of(page, "Held-out success")
    (curve, best) = re.findall(r'<path class="only c[01]" d="(.*?)"', success)
    assert curve.count("L") == best.count("L") == 4, "an evaluation before training and four more"
    assert "step 0: one answer 0.27, best of 4 answers 0.55<" in success
    by_source = figure_of(page, "Held-out success by source, one answer")
    assert ">short</span>" in by_source and ">long</span>" in by_source


def test_the_limit_is_drawn_only_where_answers_come_near_it(run, tmp_path):
    assert ">limit</span>" in figure_of(page_of(run), "Answer length")
    far = write_rl_run(tmp_path / "far", generate_max_len=1000)
    assert ">limit</span>" not in figure_of(page_of(far), "Answer length")


def test_small_shares_are_looked_at_closely(run):
    assert ">1.0 %</span>" in figure_of(page_of(run), "Clip fraction")
    change(run, lambda row: row.update(clip_fraction=0.4 + 0.001 * row["step"]))
    assert ">100 %</span>" in figure_of(page_of(run), "Clip fraction")


def test_seconds_add_up_in_the_time_line(run):
    page = page_of(run)
    line = figure_of(page, "One iteration")
    widths = [float(width) for width in re.findall(r'<rect class="phase c\d" .*? width="(.*?)"', line)]
    # A typical iteration has three phases and takes 2.69 s, the last also evaluates and takes 3.7 s.
    assert len(widths) == 7
    assert sum(widths[:3]) / sum(widths[3:]) == pytest.approx((1.4875 + 0.2 + 1.0) / 3.7, abs=1e-3)
    assert "last: evaluation 1.5 s, 41 %" in line
    assert (
        "a typical iteration takes 2.7 s; from the beginning to the end of the run it fell from 3.1 s to 2.2 s" in page
    )
    assert "<td>evaluation</td><td>6.0 s</td><td>5 %</td><td>–</td><td>1.5 s</td>" in page


def test_a_long_run_stays_a_small_page(run):
    write_metrics(run, [rl_row(step, 2000, step % 100 == 0, critic=True) for step in range(1, 2001)])
    assert "means of 10 iterations" in figure_of(page := page_of(run), "Over the run") and len(page) < 900_000


def test_best_and_worst_answers_of_the_first_and_last_iteration_stand_side_by_side(run):
    evil = "</pre><script>alert('x')</script>"
    rows = [
        {"step": step, "prompt": f"prompt {step} {evil}", "response": f"answer {reward}", "reward": reward, "tokens": 3}
        | {"kept": "best" if reward > 0 else "worst"}
        for step in (1, 2, 40)
        for reward in (0.5, 1.0, -1.0, 0.0)
    ]
    write_lines(run / "rollouts.jsonl", rows)
    page = page_of(run)
    shown = page.split("Best and worst answers")[1].split("<h2>")[0]
    assert "prompt 2 " not in shown
    assert re.findall(r"<h3>(.*?)</h3>", shown) == [
        f"{kind} of iteration {step}" for kind in ("Best", "Worst") for step in (1, 40)
    ]
    assert re.findall(r"<b>reward (.*?)</b>", shown) == ["1", "0.5"] * 2 + ["-1", "0"] * 2
    assert "&lt;script&gt;" in shown and "3 tokens" in shown


@pytest.mark.parametrize(
    ("rewards", "best", "worst"),
    [
        ([1.0, 1.0, 0.0, 0.0], [1.0, 1.0], [0.0, 0.0]),
        ([1.0, 0.0, 0.0, 0.0], [1.0], [0.0, 0.0]),
        ([1.0, 1.0, 1.0, 0.5], [1.0, 1.0], [0.5]),
        ([3, 2, 1, 0, -1, -2, -3, -4], [3, 2, 1], [-4, -3, -2]),
        ([1.0] * 5, [1.0] * 3, []),
        ([1.0], [1.0], []),
    ],
)
def test_an_answer_as_bad_as_the_worst_is_not_among_the_best(rewards, best, worst):
    ordered = sorted(rewards, reverse=True)
    half = len(rewards) - len(rewards) // 2
    rows = [{"reward": reward, "kept": "best" if place < half else "worst"} for place, reward in enumerate(ordered)]
    found = best_and_worst(rows)
    assert [[row["reward"] for row in side] for side in found] == [best, worst]


@pytest.mark.parametrize(
    "row",
    [
        {"reward": None, "response": None, "prompt": [1], "finish": {}, "tokens": "many"},
        {"reward": float("nan"), "response": "\x00", "finish": "abort"},
        {},
    ],
)
def test_odd_rollouts_are_shown_as_they_are(row, run):
    odd = {"step": 1, "kept": "best", "group": "train", "row": 3, **row}
    (run / "rollouts.jsonl").write_text(json.dumps(odd) + "\nnot json\n")
    page = page_of(run)
    assert "no reward" in page and "Best of iteration 1" in page and "Worst of" not in page
    assert "rollouts.jsonl is cut off" in page


def test_answers_before_and_after_stand_side_by_side(run):
    samples = [{"prompt": "sort 21>", "before": "21", "after": "12", "reference": "12"}]
    (run / "samples.json").write_text(json.dumps(samples))
    page = page_of(run)
    assert "class=wrong>21<" in page and "class=right>12<" in page


def test_a_run_without_a_finished_iteration_has_a_page(run):
    (run / "rollouts.jsonl").write_text("")
    write_metrics(run, [{"step": 0, **rl_evaluation(0.0)}])
    page = page_of(run)
    assert "Before training, held-out success is 27 %." in page and "No iteration is finished yet." in page
    assert "· 0 iterations" in page and "Where the time goes" not in page and "Speed, memory" not in page
    write_metrics(run, [])
    assert "No iteration is finished yet." in page_of(run)


def test_an_interrupted_run_says_how_far_it_came(run):
    write_metrics(run, [{"step": 0, **rl_evaluation(0.0)}, rl_row(1, 40, False, False), rl_row(2, 40, False, False)])
    page = page_of(run)
    assert "Iteration 2 of 40 is the last one recorded" in page and "Held-out success is 27 %" in page
    with_filtering = (run / "options.yaml").read_text() + "dynamic_filtering: true\n"
    (run / "options.yaml").write_text(with_filtering)
    assert "is the last one recorded" not in page_of(run), "such a run may end before all iterations that were planned"


def test_rows_that_miss_any_field_give_a_page(run):
    whole = rl_row(3, 40, True, True)
    for name in whole:
        if name != "step":
            write_metrics(run, [{key: value for key, value in whole.items() if key != name}] * 2)
            page_of(run)
    write_metrics(run, [{"step": 1, "reward": 1.0}, {"step": 2, "seconds_rollout": -1.0, "alarms": "odd"}])
    assert "The mean reward stayed at 1 in 2 iterations." in page_of(run).replace("\n", " ")


def test_only_scores_of_0_or_1_are_called_success(run):
    change(run, lambda row: row.update(eval_pass_1=0.5, eval_binary=False) if "eval_pass_1" in row else None)
    page = page_of(run)
    assert "Held-out score rose from 0.27 to 0.5" in page and "uccess" not in page


def test_an_evaluation_on_prompts_that_are_trained_on_is_not_called_held_out(run):
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["data"]["evaluation"]["rows_also_trained"] = 7
    (run / "manifest.json").write_text(json.dumps(manifest))
    page = page_of(run)
    assert "Evaluation success rose from 27 %" in page and "eld-out" not in page
    assert "7 of 390 prompts of the evaluation have a prompt that is trained on too: it is not held out." in page


def test_an_evaluation_shows_every_part_of_the_reward_and_intervals(run):
    change(run, lambda row: row.update({"eval_reward/right": 0.5}) if "eval_pass_1" in row else None)
    page = page_of(run)
    assert page.count('class="dots c0"') and "right, evaluation 0.5" in figure_of(page, "Parts of the reward")
    assert 'class="band spread c0"' in figure_of(page, "Held-out success") and "Pass 1 low" not in page


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"advantage_estimator": "group_norm"}, "Reinforcement learning (GRPO)"),
        ({"advantage_estimator": "reinforce_baseline"}, "Reinforcement learning (REINFORCE++ with a baseline)"),
        ({}, "Reinforcement learning (PPO)"),
    ],
)
def test_the_estimator_names_the_method(options, name, tmp_path):
    assert job_name(read_run(write_rl_run(tmp_path / "run", "ppo", **options))) == name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init_kl_coef": 0}, "none"),
        (
            {"init_kl_coef": 0.01, "use_kl_loss": "true", "kl_estimator": "k3"},
            "start; KL (k3) in the loss, weight 0.01",
        ),
        ({"init_kl_coef": 0.01, "kl_target": 0.1}, "start; KL (k1) in the reward, weight 0.01, adapted towards 0.1"),
    ],
)
def test_the_place_of_the_kl_is_said(options, words, tmp_path):
    page = page_of(write_rl_run(tmp_path / "run", **options))
    assert f"<dt>reference</dt><dd>{words}" in page.replace("the model as it was at the ", "")


def test_an_adaptive_weight_of_the_kl_has_a_picture_and_a_fixed_one_has_none(run):
    assert "Weight of the KL" not in page_of(run)
    change(run, lambda row: row.update(kl_coefficient=0.001 * row["step"]))
    assert "Weight of the KL" in page_of(run)


def test_runs_are_compared_by_success_and_not_by_loss(run, tmp_path):
    other = write_rl_run(tmp_path / "other", "ppo", steps=20)
    page = checked(write_comparison([run, other]).read_text())
    assert "<td>held-out success, one answer</td><td>94 %</td><td>94 %</td>" in page
    assert "<td>iterations</td><td>40</td><td>20</td>" in page and "<td>loss</td>" not in page
    assert "<b>Rollout tokens a second</b>" in page and "<b>Explained variance</b>" in page
    success = page.split("<b>Held-out success, one answer</b>")[1].split("</figure>")[0]
    assert 'class="only c0"' in success and 'class="dots c1"' in success


def test_what_cannot_be_compared_is_said(run, tmp_path):
    other = read_run(write_rl_run(tmp_path / "other", "ppo"))
    assert list(comparability([read_run(run), other])) == [], "presets of one job are comparable"
    other.manifest["reward"] = "another"
    assert "different rewards" in next(comparability([read_run(run), other]))
    supervised = pages.write_run(tmp_path / "sft")
    assert "different jobs" in next(comparability([read_run(run), read_run(supervised)]))
    page = checked(write_comparison([supervised, run]).read_text())
    assert "<b>Loss</b>" in page and "<b>Reward</b>" in page


def test_files_cut_or_scribbled_over_at_any_place_still_give_a_page(run, tmp_path):
    dice = random.Random(6)
    other = write_rl_run(tmp_path / "other", "ppo", generate_max_len=10)
    for _ in range(8):
        pages.scribble(other, run, dice)
        page_of(run)
        checked(write_comparison([run, other]).read_text())


def test_a_replayed_run_does_not_take_the_recording_s_rewards_for_its_own(tmp_path):
    page = page_of(write_rl_run(tmp_path / "run", replay="some/recording"))
    assert (
        "Rewards and answers are the recording's" in page.replace("&#x27;", "'") and "The mean reward rose" not in page
    )
    assert "as recorded in some/recording" in page


def test_a_run_whose_teacher_is_its_only_reward_tells_of_the_teacher(tmp_path):
    run = write_rl_run(tmp_path / "run", job="reinforce", teacher_model="a/teacher")
    change(run, lambda row: row.update(reward=0.0, teacher_kl=1.0 / row["step"]))
    page = page_of(run)
    assert "KL to the teacher fell from" in page and "mean reward stayed" not in page


def test_files_among_the_runs_are_passed_over(tmp_path, trimtab):
    runs = [write_rl_run(tmp_path / name) for name in ("a", "b")]
    (tmp_path / "gcg_eval_a.jsonl").write_text("{}")
    assert trimtab("report", *runs, tmp_path / "gcg_eval_a.jsonl").code == 0
    assert (tmp_path / "a" / "comparison.html").exists()


def group_rows(steps, **more):
    """Two groups of four answers: a training prompt's and an evaluation prompt's."""
    return [
        {"step": step, "row": 4, "prompt": "sort 21>", "label": "12", "response": f"{which} {step} {answer}"}
        | {"reward": answer / 3, "parts": {"exact": answer / 3, "length": 0.5}, "advantage": answer - 1.5}
        | {"tokens": 2, "finish": "stop", "kept": None, "group": which, **more}
        for step in steps
        for which in ("train", "evaluation")
        for answer in range(4)
    ]


def test_groups_of_the_same_prompts_are_shown_over_iterations_and_can_be_filtered(run):
    write_lines(run / "rollouts.jsonl", group_rows((0, 5, 40)))
    shown = page_of(run).split("Answers to the same prompts")[1].split("<h2>")[0]
    assert shown.index("evaluation4") < shown.index("train4")
    for which in ("evaluation", "train"):
        prompt = shown.split(f'<div class="card prompt {which}4">')[1].split('<div class="card prompt')[0]
        assert "<pre>sort 21&gt;</pre>" in prompt and "label: 12" in prompt
        assert re.findall(r"<summary>(.*?): 4 answers, mean reward 0.5<", prompt) == [
            "before training", "iteration 5", "iteration 40",
        ]  # fmt: skip
        assert "exact 0.333, length 0.5, advantage -0.5, 2 tokens" in prompt
        assert f".browser:has(#row-{which}4:checked) .prompt:not(.{which}4){{display:none}}" in shown
    assert re.findall(r"<article class=(\w+)><p><b>reward (.*?)<", shown)[:4] == [
        ("low", "0"), ("low", "0.333"), ("high", "0.667"), ("high", "1"),
    ]  # fmt: skip
    assert '<input type=radio name=reward id="reward-high">0.667 and more' in shown


@pytest.mark.parametrize(
    ("rewards", "edges"),
    [
        ([0, 1], (0, 1)),
        ([0, 0, 0, 1], (0, 1)),
        ([0, 1, 1, 1], (0, 1)),
        ([1, 1], (1, 1)),
        ([3, 1, 2], (2, 3)),
        ([], (0, 0)),
    ],
)
def test_rewards_are_parted_where_they_differ(rewards, edges):
    assert edges_of(rewards) == edges


def test_what_a_model_writes_stays_text(run):
    evil = "</pre><script>alert(1)</script><style>*{display:none}</style>"
    write_lines(run / "rollouts.jsonl", group_rows((1,), response=evil, prompt=evil, label=evil, finish=evil))
    page = page_of(run)  # which fails on a script
    assert "alert(1)&lt;/script&gt;" in page and page.count("<style>") == 2


def test_the_spread_of_rewards_and_lengths_is_drawn_over_the_run(run):
    page = page_of(run)
    rewards = figure_of(page, "Rewards of the answers")
    assert "iteration 1: 98 % from 0 to 0.0625" in rewards and "iteration 40: 62 % from 0.938 to 1" in rewards
    assert "iteration 1: 94 % from 5 to 5.19" in figure_of(page, "Lengths of the answers")
    assert 'class="dots small c0"' in figure_of(page, "Reward against KL")


def test_prompts_are_told_by_what_became_of_them(run):
    page = page_of(run)
    assert "7 prompts, answered 17.1 times on average." in page
    # The last visit of row 0 is at 40 of 40, that of row 4 at 39 of 40, ...
    for kind, count, rows in (
        ("solved", "6 (86 %)", "1 to 5 and 9"),
        ("hopeless", "1 (14 %)", "8"),
        ("mixed", "0 (0 %)", "–"),
    ):
        assert re.search(rf"<td>{kind}: [^<]*</td><td>{re.escape(count)}</td><td>{rows}</td>", page), kind
    change(run, lambda row: row.update(prompt_scores=[[0, 0.3 + row["step"] / 100], [1, 0.5]]))
    page = page_of(run)
    assert re.search(r"<td>learning: [^<]*</td><td>1 \(50 %\)</td><td>1</td>", page)
    assert re.search(r"<td>mixed: [^<]*</td><td>1 \(50 %\)</td><td>2</td>", page)
    change(run, lambda row: row.update(prompt_scores=[[0, 3.0]]))
    assert "answered" not in page_of(run).split("Spread of the answers")[1].split("<figure")[0], "no rates of success"


def test_a_curve_that_never_moves_is_a_line_of_text(run):
    change(
        run, lambda row: row.update(clip_fraction=0.0, truncated=0.25, policy_kl=row["step"], log_prob_gap=row["step"])
    )
    page = page_of(run)
    assert "Always the same: clip fraction 0 %; answers cut at the limit 25 %." in page
    assert "<b>Clip fraction</b>" not in page and "<b>Answers cut at the limit</b>" not in page
