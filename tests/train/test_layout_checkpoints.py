"""A checkpoint of any layout of processes is read by any other: weights and optimizer exactly, and the run goes on as
if nothing had happened. Within a layout a run that was killed and resumed is the one that was not, bit for bit."""

import shutil
from functools import cache, partial

import pytest
import torch

from tests import warm
from tests.train import job_run
from tests.train.job_run import write_model, write_rows
from trimtab.embedded.sort_task import make_rows
from trimtab.train.checkpoint import ShardedTensors

LAYOUTS = {
    "alone": (1, ""),
    "split": (2, "--zero_stage 3"),
    "tensor": (2, "--ds_tensor_parallel_size 2"),
    "context": (2, "--ring_attn_size 2 --zero_stage 3"),
    "copies": (4, "--shard_size 2 --zero_stage 3"),
    "neighbours": (4, "--zpg 2 --zero_stage 3"),
    "grid": (4, "--ds_tensor_parallel_size 2 --zero_stage 3"),
    "rows": (4, "--ring_attn_size 2 --shard_size 2"),
}
FOUR = ("alone", "split", "tensor", "context")
PAIRS = [("tensor", "context"), ("split", "tensor")]
PAIRS += [(a, b) for a in FOUR for b in FOUR if a != b and (a, b) not in PAIRS]
PAIRS += [("copies", "grid"), ("grid", "rows"), ("rows", "neighbours"), ("neighbours", "alone"), ("alone", "copies")]
STEPS, SAVED = 4, 2  # 11 samples, 6 a step, two epochs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    write_model(folder / "model", "llama_tied")
    write_model(folder / "experts", "mixtral")
    write_rows(folder / "train.jsonl", make_rows(11, seed=1))
    return folder


def arguments(folder, out, layout, *more):
    fixed = (
        f"sft --pretrain {folder}/model --dataset {folder}/train.jsonl --train_batch_size 6 --micro_train_batch_size 2 "
        "--max_epochs 2 --max_len 40 --learning_rate 3e-3 --lr_warmup_ratio 0 --save_steps 2 --max_ckpt_num 9 "
        f"--packing_samples --save_path {out} --ckpt_path {out}/ck {LAYOUTS[layout][1]}"
    )
    return [*fixed.split(), *more]


@pytest.fixture(scope="module")
def uninterrupted(folder, tmp_path_factory):
    """The whole run of a layout, with the checkpoint of its middle; made once."""

    @cache
    def make(layout, *more):
        out = tmp_path_factory.mktemp(layout)
        assert set(warm.run_world(arguments(folder, out, layout, *more), LAYOUTS[layout][0])) == {0}
        return out

    return make


def rows_of(out):
    rows = job_run.rows(out)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return rows


def curve(out):
    return torch.tensor([[row["loss"], row["grad_norm"], row["trained_tokens"]] for row in rows_of(out)])


def write_what_was_read(place):
    """Before the first step."""
    from trimtab.train.checkpoint import write_sharded
    from trimtab.train.supervised import SupervisedRun

    plain = SupervisedRun.resume

    def resume(self):
        assert plain(self)
        write_sharded(place, self.optimizer.state(), self.mesh, self.counters.step)
        return True

    SupervisedRun.resume = resume


def resumed(folder, run, out, layout, *more) -> str:
    """What is printed by a run that goes on from what another has left that was killed after its first checkpoint."""
    shutil.copytree(run, out, dirs_exist_ok=True)
    shutil.rmtree(out / "ck" / f"global_step{STEPS}")
    (out / "ck" / "latest").write_text(f"global_step{SAVED}")
    size, _ = LAYOUTS[layout]
    prepare = dict.fromkeys(range(size), partial(write_what_was_read, out / "read"))
    first, *_ = warm.world_outputs(arguments(folder, out, layout, "--load_checkpoint", *more), size, prepare=prepare)
    written, read = ShardedTensors(run / "ck" / f"global_step{SAVED}"), ShardedTensors(out / "read")
    assert sorted(written.names()) == sorted(read.names())
    for name in written.names():
        assert torch.equal(written.whole(name), read.whole(name)), name
    return first


@pytest.mark.short(1)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_run_goes_on_in_another_layout(folder, uninterrupted, tmp_path, first, second):
    assert "resumed with another layout" in resumed(folder, uninterrupted(first), tmp_path, second)
    torch.testing.assert_close(curve(tmp_path), curve(uninterrupted("alone")), atol=1e-4, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), [("tensor", "split"), ("split", "grid"), ("grid", "alone")])
def test_experts_that_were_cut_in_stripes_are_read_in_another_layout(folder, uninterrupted, tmp_path, first, second):
    model = "--pretrain", f"{folder}/experts"
    resumed(folder, uninterrupted(first, *model), tmp_path, second, *model)


@pytest.mark.short(1)
@pytest.mark.parametrize("layout", ["tensor", "context", "split", "copies", "neighbours", "grid", "rows"])
def test_within_a_layout_a_resumed_run_is_the_one_that_was_not_stopped(folder, uninterrupted, tmp_path, layout):
    """Bit for bit, dropout included."""
    dropout = "--lora_rank", "4", "--lora_dropout", "0.2"
    run = uninterrupted(layout, *dropout)
    assert "another layout" not in resumed(folder, run, tmp_path, layout, *dropout)
    assert rows_of(tmp_path) == rows_of(run)
