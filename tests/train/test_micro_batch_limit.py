"""A pass that does not fit into memory is cut smaller; the numbers stay."""

import resource
import shutil
from functools import partial

import pytest
import torch

from tests import warm
from tests.train.job_run import NoStop, relative_difference, rows
from tests.train.jobs import job_words, run_of, write_job
from trimtab.cli.main import main
from trimtab.distributed.device import is_out_of_memory
from trimtab.errors import OutOfMemory, RunFailed
from trimtab.train.update import MicroBatchLimit, memory_guard, retry_smaller

STEP = "--train_batch_size 8 --micro_train_batch_size 8 --max_epochs 1 --learning_rate 1e-3"


def with_room_for(tokens: int, monkeypatch) -> list[int]:
    """Let every model run out of memory in passes of more tokens; the sizes of those that fitted."""
    from trimtab.models.policy import Policy
    from trimtab.models.reward import RewardModel

    fitted = []
    for kind in (Policy, RewardModel):
        forward = kind.forward

        def limited(self, batch, *args, _forward=forward, **keywords):
            if batch.tokens > tokens:
                raise torch.OutOfMemoryError(f"tried to allocate room for {batch.tokens} tokens")
            fitted.append(batch.tokens)
            return _forward(self, batch, *args, **keywords)

        monkeypatch.setattr(kind, "forward", limited)
    return fitted


@pytest.mark.short(3)
@pytest.mark.parametrize("packing", ["", "--packing_samples"])
@pytest.mark.parametrize("name", ["rm", "dpo", "kto"])
def test_a_step_begun_anew_in_smaller_passes_has_the_same_gradient(tmp_path, monkeypatch, name, packing):
    write_job(tmp_path, name)
    words = f"{STEP} {packing}"
    whole = run_of(tmp_path, name, words)
    whole_row = whole.train_step(NoStop())
    cut = run_of(tmp_path, name, words)
    fitted = with_room_for(110, monkeypatch)
    row = cut.train_step(NoStop())
    assert fitted and row["micro_batches"] > whole_row["micro_batches"]
    assert row["loss"] == pytest.approx(whole_row["loss"], rel=1e-6)
    assert row["grad_norm"] == pytest.approx(whole_row["grad_norm"], rel=1e-5)
    moved = [{n: m.detach().clone() for n, m in run.optimizer.masters.items()} for run in (whole, cut)]
    assert relative_difference(*moved) < 1e-5


def test_the_run_says_so_goes_on_and_resumes_as_it_was(tmp_path, monkeypatch, capsys):
    write_job(tmp_path, "dpo", rows=32)
    argv = (
        f"--pretrain {tmp_path}/model --dataset {tmp_path}/train.jsonl --max_len 40 {job_words(tmp_path, 'dpo', STEP)}"
    )

    def run(place: str, words: str = "") -> list[dict]:
        where = ["--save_path", f"{tmp_path}/{place}", "--ckpt_path", f"{tmp_path}/{place}/checkpoints"]
        assert main(["dpo", *argv.split(), *where, "--save_steps", "2", *words.split()]) == 0
        return rows(tmp_path / place)

    with_room_for(110, monkeypatch)
    once = run("once")
    assert "out of memory in step 1: begun anew in passes of at most" in capsys.readouterr().out
    assert once[0]["pass_samples"] < 8 and once[-1]["pass_samples"] == once[0]["pass_samples"]
    # The same run, stopped after its second step and gone on where there is room for everything: cut as before.
    monkeypatch.undo()
    shutil.copytree(tmp_path / "once", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "global_step4")
    (tmp_path / "again" / "checkpoints" / "latest").write_text("global_step2")
    assert run("again", "--load_checkpoint") == once


def test_a_sample_that_does_not_fit_alone_ends_the_run_with_a_checkpoint(tmp_path, monkeypatch, capsys):
    write_job(tmp_path, "sft")
    run = run_of(tmp_path, "sft", f"{STEP} --packing_samples")
    with_room_for(5, monkeypatch)
    with pytest.raises(RunFailed, match=r"does not fit into memory.*--max_len.*go on from .*global_step0") as failure:
        run.train_step(NoStop())
    assert "\n" not in str(failure.value)
    assert (tmp_path / "out" / "ck" / "global_step0" / "state.json").exists()


def test_evaluation_is_cut_smaller_too(tmp_path, monkeypatch):
    write_job(tmp_path, "sft")
    run = run_of(tmp_path, "sft", f"{STEP} --eval_dataset {tmp_path}/train.jsonl")
    whole = run.evaluate()
    with_room_for(60, monkeypatch)
    assert run.evaluate() == pytest.approx(whole, rel=1e-5)
    assert run.task.micro_batch_limit.samples < 8


def short_of_room(tokens: int) -> None:
    """In a process of its own, which ends with it."""
    with_room_for(tokens, pytest.MonkeyPatch())


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)])
def test_one_process_without_room_and_all_begin_the_step_anew(tmp_path, stage):
    write_job(tmp_path, "sft")
    words = f"sft --pretrain {tmp_path}/model --dataset {tmp_path}/train.jsonl --max_len 40 {STEP} --zero_stage {stage}"
    words += f" --eval_dataset {tmp_path}/train.jsonl --eval_split train --micro_train_batch_size 4 --input_key input"

    def run(place: str, prepare: dict) -> list[dict]:
        where = ["--save_path", f"{tmp_path}/{place}", "--ckpt_path", f"{tmp_path}/{place}/checkpoints"]
        printed = "".join(warm.world_outputs([*words.split(), *where], 2, prepare=prepare))
        assert ("begun anew in passes of at most" in printed) == bool(prepare)
        return rows(tmp_path / place)

    whole = run("whole", {})
    cut = run("cut", {1: partial(short_of_room, 40)})
    assert [row["step"] for row in cut] == [row["step"] for row in whole]
    assert cut[0]["pass_samples"] < 4
    for before, after in zip(whole, cut):
        for name in ("loss", "grad_norm", "eval_loss"):
            assert after.get(name) == (before.get(name) and pytest.approx(before[name], rel=1e-4)), name


def _real_shortage(marker) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))
    try:
        torch.empty(2**44, dtype=torch.uint8)
    except RuntimeError as error:
        marker.write_text(str(is_out_of_memory(error)))


def test_the_cpu_allocator_is_understood(tmp_path):
    assert warm.call(_real_shortage, tmp_path / "said") == 0
    assert (tmp_path / "said").read_text() == "True"


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes"), memory_guard(lambda: pytest.fail("nothing to undo")):
        raise RuntimeError("shapes do not fit")


def test_until_it_fits_tells_why_and_tries_again():
    told, tries = [], iter([OutOfMemory("one"), OutOfMemory("two"), None])

    def attempt() -> str:
        if (problem := next(tries)) is not None:
            raise problem
        return "done"

    assert retry_smaller(attempt, told.append) == "done" and told == ["one", "two"]


def test_a_limit_halves_the_largest_pass_until_single_samples():
    limit = MicroBatchLimit()
    assert limit.halve([(10, 1), (7, 2)], by_tokens=True) and limit.tokens == 3
    assert not limit.halve([(10, 1), (3, 1), (4, 1)], by_tokens=True)
    assert limit.of_tokens(100) == 3 and limit.of_samples(8) == 8 and limit.columns() == {"pass_tokens": 3}
    assert limit.halve([(10, 5)], by_tokens=False) and str(limit) == "3 tokens and 2 samples"
