import pytest

from tests.report.pages import write_rl_run
from trimtab.files import locked, mark_finished, mark_unfinished
from trimtab.report.run_data import Condition, FollowedRun, progress_of, state_of


@pytest.fixture
def run(tmp_path):
    followed = FollowedRun(write_rl_run(tmp_path / "run", steps=10))
    followed.refresh()
    return followed


def test_a_run_with_its_model_has_finished(run):
    assert state_of(run).condition is Condition.FINISHED


def test_a_run_is_running_while_its_process_holds_the_folder(run):
    mark_unfinished(run.folder)
    assert state_of(run).condition is Condition.STOPPED
    with locked("save_path", run.folder):
        assert state_of(run, now=run.written + 5).condition is Condition.RUNNING
        silent = state_of(run, now=run.written + 300)
        assert silent.condition is Condition.SILENT and silent.in_words == "silent for 5 min 00 s"
    assert state_of(run, now=run.written + 5).condition is Condition.STOPPED
    mark_finished(run.folder)
    assert state_of(run).condition is Condition.FINISHED


def test_long_iterations_are_not_taken_for_silence(run):
    mark_unfinished(run.folder)
    for row in run.run.rows:
        row["seconds"] = 600.0
    with locked("save_path", run.folder):
        assert state_of(run, now=run.written + 1200).condition is Condition.RUNNING
        assert state_of(run, now=run.written + 4000).condition is Condition.SILENT


def test_where_another_machine_is_at_work_only_silence_tells(run):
    mark_unfinished(run.folder)
    (run.folder / ".lock").write_text("process 7 on elsewhere")
    assert state_of(run, now=run.written + 5).condition is Condition.RUNNING
    assert state_of(run, now=run.written + 300).condition is Condition.SILENT


def test_before_anything_is_written_a_run_is_awaited_and_then_starting(tmp_path):
    followed = FollowedRun(tmp_path / "later")
    followed.refresh()
    assert state_of(followed).condition is Condition.AWAITED
    with locked("save_path", tmp_path / "later"):
        assert state_of(followed).condition is Condition.STARTING


def test_what_is_left_is_told_by_the_last_steps(run):
    for row in run.run.rows[-10:]:
        row["seconds"] = 3.0
    run.run.manifest["steps"] = 25
    progress = progress_of(run.run)
    assert (progress.done, progress.share, progress.remaining) == (10, 0.4, 45.0)
