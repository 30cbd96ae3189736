import json

import pytest

from tests.report.pages import FIGURES, write_async_run, write_episode_run, write_rl_run, write_run
from trimtab.files import mark_unfinished
from trimtab.report.run_data import FollowedRun
from trimtab.report.terminal_view import Sparkline, Watched, harmless, lines_of, overview


def watched(folder) -> Watched:
    found = Watched(FollowedRun(folder))
    found.refresh()
    return found


def shown(run, width=80, height=None) -> str:
    return "\n".join(line.plain for line in lines_of(run, width, height))


def change(folder, name, row, **fields):
    lines = (folder / name).read_text().splitlines()
    lines[row] = json.dumps(json.loads(lines[row]) | fields)
    (folder / name).write_text("\n".join(lines) + "\n")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.mark.parametrize("job", FIGURES)
def test_a_job_with_fixed_data_shows_its_loss_and_its_learning_rate(job, folder):
    text = shown(watched(write_run(folder, job)))
    assert "finished   step 40 of 40" in text and "took 4.0 s" in text
    rows = {line[:13].strip(): line for line in text.splitlines()}
    assert rows["loss"].endswith("0.155  from 2.81") and rows["eval loss"].endswith("0.075  from 0.3")
    assert rows["learning rate"].endswith("2.5e-5  from 0.001")
    assert "memory 0.50 GiB  1,000 tokens/s" in text


@pytest.mark.parametrize("job", ["ppo", "grpo", "tail"])
def test_an_rl_run_shows_reward_evaluation_distance_time_and_answers(job, folder):
    text = shown(watched(write_rl_run(folder, job)))
    rows = {line[:13].strip(): line for line in text.splitlines()}
    assert rows["reward"].endswith("0.95  from 0.268") and "94 %  from 27 %" in rows["evaluation"].replace("\xa0", " ")
    assert all(name in rows for name in ("KL", "entropy", "length"))
    # Of the last ten iterations: 10 s of update, 2 s of scoring, 1.5 s of evaluation and 11.1 s of rollouts.
    assert "update 41" in rows["time"] and "evaluation 6" in rows["time"]
    assert "best 1 of 2 of iteration 40  reward 1  5 tokens, ended by itself" in text
    assert "worst 1 of 2 of iteration 40  reward 0.25" in text


def test_an_asynchronous_run_tells_what_is_under_way(folder):
    assert "31 groups under way" in (text := shown(watched(write_async_run(folder))))
    assert "oldest 1 update old" in text and "engines busy 92" in text and "trainer waiting 30" in text


def test_an_episode_is_a_conversation(folder):
    text = shown(watched(write_episode_run(folder)))
    assert "Find my number from 1 to 7 in 3 guesses." in text
    assert "model: 4\nuser: higher\nmodel: 6  +1" in text and "3 turns" in text


def test_an_alarm_of_the_newest_row_comes_first(folder):
    write_rl_run(folder)
    change(folder, "metrics.jsonl", 3, alarms=["the reward is stuck at 0.3"])
    change(folder, "metrics.jsonl", 40, alarms=["entropy fell to 0.01, below a tenth"])
    run = watched(folder)
    assert [(now, text.split(" (")[0]) for now, text in run.alarms[:2]] == [
        (True, "Entropy fell to 0.01, below a tenth"),
        (False, "The reward is stuck at 0.3"),
    ]
    assert "! Entropy fell" in shown(run, 80, 24)


def test_nobody_says_twice_that_a_run_goes_on(folder):
    write_rl_run(folder, steps=9)
    mark_unfinished(folder)
    assert watched(folder).alarms == []


@pytest.mark.parametrize("width, height", [(80, 24), (40, 10), (20, 3), (200, 60), (1, 1)])
def test_no_more_than_the_screen_is_filled(width, height, folder):
    write_episode_run(folder)
    change(folder, "metrics.jsonl", 40, alarms=[f"{'something is wrong here ' * 20}{n}" for n in "abcdef"])
    run = watched(folder)
    for lines in (lines_of(run, width, height), overview([run] * 9, width, height)):
        assert len(lines) <= height
        assert all(line.cell_len <= max(width, 10) for line in lines)


def test_a_long_answer_can_be_scrolled_to_its_end_and_no_further(folder):
    write_rl_run(folder, steps=3)
    answer = "\n".join(f"line {n}" for n in range(100))
    for row in (8, 9):
        change(folder, "rollouts.jsonl", row, response=answer)
    run = watched(folder)
    assert "line 0" in (top := shown(run, 80, 24)) and "more lines" in top and "line 99" not in top
    run.scrolled = 10_000
    assert "line 99" in (end := shown(run, 80, 24)) and "best 1 of 2" in end and "more line" not in end


def test_what_a_run_is_called_cannot_steer_the_terminal(folder):
    write_rl_run(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"job": "\x1b[2J\x9bjob"}))
    text = shown(watched(folder), width=400)  # room for it behind a folder of any length
    assert "job" in text and "\x1b" not in text and "\x9b" not in text


def test_what_could_not_be_read_is_told(folder):
    write_rl_run(folder)
    (folder / "options.yaml").write_bytes(b"a: [")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n")
    text = shown(watched(folder))
    assert "options.yaml" in text and "metrics.jsonl: 1 unreadable" in text


def test_what_a_model_says_cannot_steer_the_terminal(folder):
    write_rl_run(folder, steps=2)
    for row in range(4, 8):
        change(folder, "rollouts.jsonl", row, response="\x1b]0;title\x07\x1b[2J\u202eevil\x9b\r\x7f日本 👩\u200d🔧")
    text = shown(watched(folder))
    assert "␛]0;title␇␛[2Jevil�␍�日本 👩\u200d🔧" in text
    assert harmless("a\tb\nc") == "a    b\nc"


def test_the_curve_of_many_steps_has_the_newest_at_its_end():
    points = [(step, float(step)) for step in range(1, 1001)]
    drawn = Sparkline("loss", points).drawn(30)
    assert 25 <= len(drawn) <= 30 and drawn[0] == "▁" and drawn[-1] == "█" and list(drawn) == sorted(drawn)
    assert Sparkline("flat", [(1, 2.0), (2, 2.0)]).drawn(30) == "▄▄"


def test_keys_move_among_answers_and_iterations(folder):
    run = watched(write_rl_run(folder, steps=3))
    shelf = run.shelf

    def where():
        answer = shelf.shown()
        return answer.step, answer.kind, answer.number

    assert where() == (3, "best", 1)
    shelf.turn(1)
    shelf.turn(1)
    assert where() == (3, "worst", 1)
    shelf.go(-1)
    assert where() == (2, "worst", 1)
    shelf.jump("best")
    assert where() == (2, "best", 1)
    shelf.go(-5)
    assert where() == (1, "best", 1)
    shelf.go(5)
    assert shelf.step is None, "from here on the newest is followed"
    shelf.turn(-1)
    assert where() == (3, "worst", 2)


def test_answers_of_an_iteration_are_shown_when_all_are_written(folder):
    write_rl_run(folder, steps=3)
    with (folder / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "prompt": "a", "response": "b", "reward": 1.0, "kept": "best"}) + "\n")
    assert watched(folder).shelf.shown().step == 3


def test_several_runs_have_a_line_each(tmp_path):
    runs = [watched(write_rl_run(tmp_path / "a")), watched(write_run(tmp_path / "b", "dpo"))]
    runs.append(watched(tmp_path / "later"))
    text = "\n".join(line.plain for line in overview(runs, 100, 24))
    assert text.count("finished") == 2 and "no run here yet" in text and "reward" in text and "loss" in text
