"""The checks before the first step leave no trace, in one process and in several, also where they run out of memory."""

import math
import shutil

import numpy as np
import pytest
import torch

from tests import warm
from tests.models.families import write_family
from tests.models.test_reward import WITHOUT_CLASSIFIER
from tests.train.job_run import make_run, rows, weights, write_model, write_rows
from tests.train.jobs import JOBS, job_words, write_job
from tests.train.rl import rl_run
from tests.train.tail import tail_run
from trimtab.cli.main import main
from trimtab.config.jobs import SFTOptions
from trimtab.distributed.random_state import random_state
from trimtab.embedded.sort_task import make_rows
from trimtab.errors import UserError
from trimtab.train import proof, run_directory
from trimtab.train.proof import CheckResult, Proof, TrialUpdate, check_micro_batches, check_neighbours, check_update
from trimtab.train.rl.loop import RLRun
from trimtab.train.supervised import SupervisedRun
from trimtab.train.supervised_proof import prove_supervised, trial_of
from trimtab.train.supervised_tasks import SFTTask
from trimtab.train.update import RebuildModels

CLOCK = ("seconds", "tokens_per_second", "memory_gib")


@pytest.fixture
def job(tmp_path):
    """The words of a run into the folder of this name."""
    write_model(tmp_path / "model")
    write_rows(tmp_path / "sft.jsonl", make_rows(16, seed=1))

    def words(name: str, *more: str) -> list[str]:
        fixed = (
            f"sft --pretrain {tmp_path}/model --dataset {tmp_path}/sft.jsonl --train_batch_size 8 --max_len 40 "
            f"--micro_train_batch_size 4 --max_epochs 1 --learning_rate 3e-3 --save_path {tmp_path}/{name}"
        )
        return [*fixed.split(), *" ".join(more).split()]

    return words


def unhurried() -> None:
    """Checks have time, on a busy machine too."""
    proof.SECONDS = 600.0


UNHURRIED = {0: unhurried, 1: unhurried}


def short_in_the_trial() -> None:
    """The trial step does not fit into this process's memory, in the middle of it."""
    unhurried()

    def short(*_):
        raise torch.OutOfMemoryError("tried to allocate a copy")

    TrialUpdate.unmoved = short


def numbers(out) -> list[dict]:
    return [{name: value for name, value in row.items() if not name.startswith(CLOCK)} for row in rows(out)]


@pytest.mark.short(1)
@pytest.mark.parametrize(
    "split", ["--zero_stage 3", "--zero_stage 2 --lora_rank 4 --lora_dropout 0.1", "--ds_tensor_parallel_size 2"]
)
def test_checks_of_two_processes_leave_the_run_bit_for_bit_as_it_is(job, tmp_path, split):
    said = "".join(warm.world_outputs(job("checked", split), 2, prepare=UNHURRIED))
    assert "checks: data, rendering, update, micro_batches, neighbours tried in" in said
    warm.world_outputs(job("plain", split, "--skip_checks all"), 2)
    assert numbers(tmp_path / "checked") == numbers(tmp_path / "plain")
    rl_run.assert_same_tensors(weights(tmp_path / "checked"), weights(tmp_path / "plain"))


def test_one_of_two_processes_without_room_for_the_checks_and_the_run_goes_on_without_them(job, tmp_path):
    said = "".join(warm.world_outputs(job("short", "--zero_stage 3"), 2, prepare={0: unhurried, 1: short_in_the_trial}))
    assert "checks: data, rendering tried in" in said and "update, micro_batches, neighbours" in said
    warm.world_outputs(job("plain", "--zero_stage 3 --skip_checks all"), 2)
    assert numbers(tmp_path / "short") == numbers(tmp_path / "plain")
    rl_run.assert_same_tensors(weights(tmp_path / "short"), weights(tmp_path / "plain"))


@pytest.mark.long
@pytest.mark.parametrize("prepare", [UNHURRIED, {0: unhurried, 1: short_in_the_trial}])
def test_the_same_in_rl(tmp_path, prepare):
    task = rl_run.write_task(tmp_path)
    words = [*rl_run.arguments(task, task / "checked", "ppo"), "--zero_stage", "3"]
    said = "".join(warm.world_outputs(words, 2, prepare=prepare))
    tried, _, left_out = said.partition("checks: ")[2].partition(" tried in")
    assert "objective" in tried and "engine" in left_out.partition("\n")[0]
    assert ("micro_batches" in tried) == (prepare is UNHURRIED)
    plain = [*rl_run.arguments(task, task / "plain", "ppo"), "--zero_stage", "3", "--skip_checks", "all"]
    warm.world_outputs(plain, 2)
    rl_run.assert_identical(rl_run.result(task / "checked"), rl_run.result(task / "plain"))


def test_without_room_check_says_what_it_left_out(job, tmp_path):
    said = "".join(warm.world_outputs(["check", *job("out")], 2, prepare={0: unhurried, 1: short_in_the_trial}))
    assert "update, micro_batches, neighbours" in said and not (tmp_path / "out").exists()


# ---- one process


@pytest.mark.parametrize("verb", ["dpo", "rm"])
def test_pairs_with_equal_answers_are_left_out_of_the_trial(tmp_path, capsys, verb):
    """They have no gradient but what rounding leaves of one. Here they are the shortest."""
    write_model(tmp_path / "model")
    pairs = [{"prompt": "p", "chosen": "12", "rejected": "12"}] * 6
    pairs += [{"prompt": "p", "chosen": "1" * n, "rejected": "2" * n} for n in range(4, 14)]
    write_rows(tmp_path / "pairs.jsonl", pairs)
    words = f"check {verb} --pretrain {tmp_path}/model --dataset {tmp_path}/pairs.jsonl --prompt_key prompt "
    words += f"--max_len 40 --train_batch_size 16 --micro_train_batch_size 8 --save_path {tmp_path}/out"
    assert main(words.split()) == 0
    assert "check micro_batches: the gradient of 4 samples" in capsys.readouterr().out


def test_what_is_no_number_is_the_largest():
    assert proof.largest([1.0, math.nan]) == proof.largest([math.nan, 1.0]) == math.inf and proof.largest([1, 2]) == 2


@pytest.mark.parametrize("packed, size, tried", [(False, 4, 4), (False, 3, 3), (False, 1, 2), (True, 60, 2)])
def test_a_row_of_the_trial_is_no_longer_than_the_runs_but_of_two_samples(
    job, monkeypatch, capsys, packed, size, tried
):
    """All samples are of the same length, 24 tokens with the template."""
    flag = f"--packing_samples --train_max_tokens_per_gpu {size}" if packed else f"--micro_train_batch_size {size}"
    monkeypatch.setattr(proof, "SECONDS", 600.0)
    monkeypatch.setattr(SFTTask, "lengths", lambda self, store: np.full(len(store), 24))
    assert main(["check", *job("out", "--train_batch_size 12", flag)]) == 0
    assert f"the gradient of {tried} samples" in capsys.readouterr().out


@pytest.fixture
def sft(tmp_path, monkeypatch):
    """Makes a run of these words."""
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(proof, "SECONDS", 600.0)
    write_model(tmp_path / "model", attention_dropout=0.1)
    write_rows(tmp_path / "train.jsonl", make_rows(16, seed=1))
    return lambda words="": make_run(SFTOptions, SFTTask, tmp_path, f"--train_batch_size 8 {words}")


def trial_in(run) -> TrialUpdate:
    return trial_of(run, [0, 1, 2, 3])


@pytest.mark.parametrize(
    "words", ["", "--lora_rank 4 --lora_dropout 0.1", "--bf16", "--adam_offload", "--optimizer muon"]
)
def test_checks_leave_weights_moments_and_random_streams_bit_for_bit(sft, words):
    run = sft(f"{words} --gradient_checkpointing")
    optimizer, torch_before = run.optimizer, torch.get_rng_state()
    before = {name: tensor.detach().clone() for name, tensor in optimizer.state().items()}
    working = {name: tensor.detach().clone() for name, tensor in run.model.named_parameters()}
    dropouts = [module.p for module in run.model.modules() if isinstance(module, torch.nn.Dropout)]
    streams = str(random_state())
    prove_supervised(run)
    assert str(random_state()) == streams and torch.equal(torch.get_rng_state(), torch_before)
    rl_run.assert_same_tensors(optimizer.state(), before)
    rl_run.assert_same_tensors(dict(run.model.named_parameters()), working)
    assert [module.p for module in run.model.modules() if isinstance(module, torch.nn.Dropout)] == dropouts
    assert run.model.training and not optimizer.gradients()


def test_a_trial_has_no_dropout_and_checkpoints_layers_as_a_step_does(sft):
    run = sft("--lora_rank 4 --lora_dropout 0.1 --gradient_checkpointing")
    with trial_in(run).restored():
        assert run.model.training, "in eval mode transformers checkpoints nothing"
        dropouts = [module for module in run.model.modules() if isinstance(module, torch.nn.Dropout)]
        assert dropouts and not any(module.p for module in dropouts)
    assert any(module.p == 0.1 for module in dropouts)


def test_adapters_that_are_cut_off_in_train_mode_alone_are_noticed_with_dropout(sft):
    run = sft("--lora_rank 4 --lora_dropout 0.1 --gradient_checkpointing")
    assert not check_update(trial_in(run)).problem

    def cut(layer, given, out):  # as reentrant checkpointing of a layer whose inputs need no gradient does
        return out.detach() if layer.training else out

    run.model.inner.model.layers[0].register_forward_hook(cut)
    assert "changes the loss and gets no gradient" in check_update(trial_in(run)).problem


def test_weights_that_only_choose_need_no_gradient(sft, tmp_path):
    """Which keys sparse attention reads changes the loss, and has no derivative."""
    write_family("deepseek_v32", tmp_path / "model")
    run = sft()
    name = "model.layers.0.self_attn.indexer.wk.weight"
    assert name in run.optimizer.working and not check_update(trial_in(run)).problem
    assert trial_in(run).with_effect([name]) == [name]


def test_a_frozen_tensor_that_moves_fails(sft, monkeypatch):
    run = sft("--lora_rank 4")
    head, plain = run.model.inner.lm_head.weight, run.optimizer.apply

    def apply(*given, **how):
        head.data.add_(1)
        return plain(*given, **how)

    monkeypatch.setattr(run.optimizer, "apply", apply)
    assert "lm_head.weight should be frozen and moves" in check_update(trial_in(run)).problem


def test_an_infinite_gradient_fails(sft):
    run = sft()
    run.model.inner.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    assert "the gradient of lm_head.weight is not finite" in check_update(trial_in(run)).problem


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_a_tensor_has_an_effect_if_the_loss_changes_by_more_than_by_itself(sft, monkeypatch, noise):
    run = sft()
    unused = "model.unused"
    run.optimizer.masters[unused] = run.optimizer.working[unused] = torch.nn.Parameter(torch.ones(3))
    plain, signs = TrialUpdate.loss, iter([1, -1] * 100)
    monkeypatch.setattr(TrialUpdate, "loss", lambda trial: plain(trial) + next(signs) * noise)
    trial = trial_in(run)
    with trial.restored():
        assert trial.with_effect([unused, "lm_head.weight"]) == ["lm_head.weight"]
    assert trial.with_effect([]) == []


def test_gradients_summed_in_bf16_may_round(sft, monkeypatch):
    monkeypatch.setattr(proof, "relative_difference", lambda *_: 0.01)
    assert check_micro_batches(trial_in(sft())).problem
    for words in ("--grad_accum_dtype bf16", "--bf16"):
        assert not check_micro_batches(trial_in(sft(words))).problem


def test_rows_in_bf16_may_differ_as_much_as_rounding_makes_them(sft, tmp_path, monkeypatch):
    """Two experts are about equally likely for every token, so rounding chooses, and nothing else is wrong."""
    write_model(tmp_path / "model", "gpt_oss", spread=0.6)
    run = sft("--bf16")
    embedding = run.model.inner.get_input_embeddings()

    def rounded(_, given, out):
        return out * (1 + 2**-7) if given[0].numel() > 30 else out  # in rows of several samples

    for name, weight in run.model.named_parameters():
        if "router.weight" in name:
            weight.data[1:] = weight.data[:1] * (1 + 2**-8)
    hook = embedding.register_forward_hook(rounded)
    for check in (check_micro_batches, check_neighbours):
        found = check(trial_in(run))
        assert not found.problem and "when embeddings are rounded" in found.tried
        with monkeypatch.context() as patched:
            patched.setattr(proof, "NOISE", 0)
            assert check(trial_in(run)).problem
    assert not embedding._forward_hooks.keys() - {hook.id}


def test_a_verdict_is_that_of_all_processes(sft, monkeypatch):
    trial = trial_in(sft("--lora_rank 4"))
    found = {"base_model.model.lm_head.weight": 1.0}
    plain = TrialUpdate.largest
    monkeypatch.setattr(
        TrialUpdate, "largest", lambda t, values: {n: max(v, found.get(n, 0)) for n, v in plain(t, values).items()}
    )
    assert "should be frozen and moves" in check_update(trial).problem


def test_checks_have_one_clock_and_what_it_has_no_time_for_is_left_out(sft, monkeypatch, capsys):
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(proof.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(proof, "SECONDS", 5.0)
    tried = []

    def trial(name):
        tried.append(name)
        return None, 1.0

    def left_out(planned: float, **options) -> dict:
        tried.clear()
        found = Proof(SFTOptions(**options), print)
        found.try_update(["update", "neighbours"], trial, planned)
        found.try_update(["update", "neighbours"], trial, planned)
        return found.left_out

    assert left_out(10.0) == {"neighbours": proof.SLOW} and tried == [None, "update", None]
    assert left_out(10_000.0) == {} and tried == [None, "update", "neighbours"] * 2
    assert left_out(10.0, check_only=True) == {} and tried == [None, "update", "neighbours"] * 2
    several = Proof(SFTOptions(), print, agree=lambda over: True)  # another process has no time
    assert not several.has_time(0.0, 1e9)


def test_a_failure_found_before_the_memory_ran_out_ends_the_run(sft, monkeypatch):
    run = sft()
    wrong = CheckResult("update", "a trial step", "nothing moves")
    monkeypatch.setitem(proof.TRIALS, "update", (1, lambda trial: wrong))
    monkeypatch.setitem(proof.TRIALS, "micro_batches", (1, short_of_memory))
    with pytest.raises(UserError, match="nothing moves"):
        prove_supervised(run)


def test_checks_that_were_tried_are_not_among_those_left_out(sft, monkeypatch, capsys):
    monkeypatch.setitem(proof.TRIALS, "micro_batches", (1, short_of_memory))
    prove_supervised(sft())
    said = capsys.readouterr().out
    assert "data, rendering, update tried in" in said and "left out: micro_batches, neighbours (out of memory)" in said


def short_of_memory(*_):
    raise torch.OutOfMemoryError("tried to allocate a copy")


def check(folder, verb: str, words: str) -> int:
    fixed = f"check {verb} --pretrain {folder}/model --dataset {folder}/train.jsonl --max_len 40 --train_batch_size 8"
    return main(f"{fixed} --save_path {folder}/out {words}".split())


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("sft", "--bf16 --optimizer muon"),
        ("kd", ""),
        ("dpo", "--bf16"),
        ("kto", "--lora_rank 4"),
        ("prm hard", ""),
        ("rm", "--value_head_prefix v_head"),
        ("rm", "--lora_rank 4 --value_head_prefix v_head"),
    ],
)
def test_check_of_a_sound_job_passes(tmp_path, monkeypatch, capsys, job, words):
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    write_job(tmp_path, job)
    assert check(tmp_path, JOBS[job].verb, job_words(tmp_path, job, words)) == 0
    said = "".join(capsys.readouterr())
    assert "warning" not in said and all(f"check {name}: " in said for name in ("update", "checkpoint", "export")), said
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "out"))]


@pytest.mark.parametrize("words", ["", "--lora_rank 4"])
def test_check_loads_the_export_of_a_reward_model_that_transformers_has_no_class_for(tmp_path, monkeypatch, words):
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    write_job(tmp_path, "rm", next(iter(WITHOUT_CLASSIFIER)))
    assert check(tmp_path, "rm", words) == 0


def test_check_without_checkpoints_or_room_for_them_passes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    write_job(tmp_path, "sft")
    assert check(tmp_path, "sft", "--disable_ds_ckpt") == 0
    assert "export" in capsys.readouterr().out.partition("tried in")[0]
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(run_directory.shutil, "disk_usage", lambda _: usage)
    assert check(tmp_path, "sft", "") == 0
    assert "left out: checkpoint, export (no room on the disk of --ckpt_path)" in capsys.readouterr().out


@pytest.mark.short(1)
@pytest.mark.parametrize("split", ["--zero_stage 3", "--zero_stage 2 --lora_rank 4", "--ds_tensor_parallel_size 2"])
def test_check_in_two_processes_tries_checkpoint_and_export(job, split):
    said = "".join(warm.world_outputs(["check", *job("out", split)], 2))
    assert "0 tensors read back otherwise, 0 differ after the next step: passed" in said
    assert "check export: the saved folder in plain transformers: log-probs differ by" in said


@pytest.mark.short(1)
@pytest.mark.parametrize("split", ["ppo --zero_stage 3", "grpo --zero_stage 2 --lora_rank 4", "repulse --zero_stage 3"])
def test_the_same_in_rl_with_the_reward(tmp_path, split):
    task, (method, *more) = rl_run.write_task(tmp_path), split.split()
    words = tail_run.arguments if method in tail_run.METHODS and method != "ppo" else rl_run.arguments
    said = "".join(warm.world_outputs(["check", *words(task, task / "out", method), *more], 2))
    for name in ("reward", "checkpoint", "export"):
        assert f"check {name}: " in said
    assert "0 tensors read back otherwise, 0 differ after the next step: passed" in said
    assert "left out" not in said and "failed" not in said and not (task / "out").exists()


@pytest.mark.parametrize("loop", [SupervisedRun, RLRun])
def test_where_models_must_be_rebuilt_check_ends_and_trains_nothing(job, tmp_path, capsys, loop, monkeypatch):
    def short(*_):
        raise RebuildModels

    monkeypatch.setattr(loop, "update", short)
    task = rl_run.write_task(tmp_path)
    words = job("out") if loop is SupervisedRun else rl_run.arguments(task, tmp_path / "out", "grpo")
    assert main(["check", *words]) == 0 and not (tmp_path / "out").exists()
    assert "left out: checkpoint, export (out of memory)" in capsys.readouterr().out


@pytest.mark.short(1)
@pytest.mark.parametrize("method", ["twist_model", "two_loras", "repulse", "lora", "base_proposal"])
def test_checks_of_a_tail_run_try_policy_and_proposal_and_leave_no_trace(tmp_path, monkeypatch, capsys, method):
    task = rl_run.write_task(tmp_path)
    monkeypatch.setattr(proof, "SECONDS", 600.0)
    assert main(tail_run.arguments(task, tmp_path / "checked", method)) == 0
    said = capsys.readouterr().out
    trained = 1 + (method in ("two_loras", "repulse", "lora"))
    for name, times in {"update": trained, "micro_batches": trained, "engine": 1, "objective": 0}.items():
        assert said.count(f"check {name}: ") == times, name
    assert main(tail_run.arguments(task, tmp_path / "plain", method, "--skip_checks all")) == 0
    rl_run.assert_identical(rl_run.result(tmp_path / "checked"), rl_run.result(tmp_path / "plain"))


def test_both_answers_of_a_pair_need_a_trained_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    write_job(tmp_path, "dpo")
    plain = SFTTask.__mro__[1].first_row

    def first_row(task):
        (chosen, (ids, trained)), row = plain(task)
        trained = trained.copy()
        trained[trained.nonzero()[0][-1]] = False
        return [chosen, (ids, trained)], row

    monkeypatch.setattr(SFTTask.__mro__[1], "first_row", first_row)
    assert check(tmp_path, "dpo", job_words(tmp_path, "dpo", "--skip_checks update,micro_batches,neighbours")) == 2
    assert "the end of the turn carries no loss" in capsys.readouterr().err
