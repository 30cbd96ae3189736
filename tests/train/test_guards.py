"""What would go wrong late is refused early, in one line."""

import pytest

from tests.train.jobs import run_of, write_job
from trimtab.errors import UserError


def test_samples_longer_than_learned_positions(tmp_path):
    write_job(tmp_path, "sft", "gpt2", max_position_embeddings=12)
    with pytest.raises(UserError, match=r"learned only 12 positions; lower --max_len to 12"):
        run_of(tmp_path, "sft")


def test_balance_loss_through_reentrant_checkpointing(tmp_path):
    write_job(tmp_path, "sft", "mixtral")
    with pytest.raises(UserError, match="no gradient through reentrant"):
        run_of(tmp_path, "sft", "--aux_loss_coef 0.1 --gradient_checkpointing --gradient_checkpointing_use_reentrant")


def test_a_model_that_takes_padded_rows_is_not_packed(tmp_path):
    write_job(tmp_path, "sft", "bloom")
    run = run_of(tmp_path, "sft", "--packing_samples --train_batch_size 8 --micro_train_batch_size 2")
    assert run.task.padded and [len(part) for part in run.task.cut(run.task.store, list(range(8)))] == [2, 2, 2, 2]


@pytest.mark.parametrize(("words", "line"), [("--seed -1", "--seed"), ("--save_path {}/model", "would be lost")])
def test_options_that_cannot_be_meant(tmp_path, words, line):
    write_job(tmp_path, "sft")
    with pytest.raises(UserError, match=line):
        run_of(tmp_path, "sft", words.format(tmp_path))
