"""Processes that a model cannot be shared out among: one line and exit code 2, before anything is loaded."""

import pytest

WORDS = {
    "sft": "--pretrain model --dataset train.jsonl --save_path out",
    "dpo": "--pretrain model --dataset pairs.jsonl --save_path out",
    "grpo": "--pretrain model --prompt_data train.jsonl --reward_verifier gsm8k --save_path out",
}
MISTAKES = [
    ("--nproc 3 --ds_tensor_parallel_size 2", "--ds_tensor_parallel_size 2: 3 processes cannot be shared out so"),
    ("--nproc 8 --ds_tensor_parallel_size 8 --dry_run", "--ds_tensor_parallel_size 8"),  # four heads
    ("--nproc 2 --ring_attn_size 2 --ring_head_stride 3 --dry_run", "--ring_head_stride 3"),  # two heads of keys
]
"""More of the first kind in tests/config/test_sharding.py."""


@pytest.mark.parametrize(("words", "line"), MISTAKES)
@pytest.mark.parametrize("verb", ["sft", "dpo", "grpo"])
def test_processes_that_cannot_hold_a_model_are_refused(job, place, verb, words, line):
    before = set(place.iterdir())
    assert job(verb)(*WORDS[verb].split(), *words.split()).mistake.startswith(line)
    assert set(place.iterdir()) == before
