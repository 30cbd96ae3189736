"""Processes that a model cannot be shared out among: one line and exit code 2, before anything is loaded."""

import pytest

WORDS = {
    "sft": "--pretrain model --dataset train.jsonl --save_path out",
    "dpo": "--pretrain model --dataset pairs.jsonl --save_path out",
    "grpo": "--pretrain model --prompt_data train.jsonl --reward_verifier gsm8k --save_path out",
    "tail": "--pretrain model --prompt_data train.jsonl --reward_pretrain other --save_path out",
}
MISTAKES = [
    ("--nproc 3 --ds_tensor_parallel_size 2", "--ds_tensor_parallel_size 2: 3 processes cannot be shared out so"),
    ("--nproc 3 --ring_attn_size 2", "--ring_attn_size 2: 3 processes cannot be shared out so"),
    ("--nproc 6 --ring_attn_size 2 --ds_tensor_parallel_size 2", "--ring_attn_size 2 x --ds_tensor_parallel_size 2"),
    ("--nproc 3 --shard_size 2", "--shard_size 2 must divide 3 processes"),
    ("--nproc 4 --ring_attn_size 2 --shard_size 1", "--shard_size 1 must divide 4 processes and be a multiple of"),
    ("--nproc 4 --shard_size 2 --zero_stage 0", "--shard_size splits what --zero_stage 0 does not"),
    ("--nproc 6 --zpg 4 --zero_stage 3", "--zpg 4 must divide the 6 processes"),
    ("--nproc 4 --zpg 2 --zero_stage 2", "--zpg keeps split what --zero_stage 2 does not"),
    ("--nproc 8 --zpg 2 --zero_stage 3 --ds_tensor_parallel_size 2", "--zpg and --ds_tensor_parallel_size do not"),
    ("--nproc 2 --load_in_4bit --bf16 --lora_rank 4", "--load_in_4bit: 4-bit weights cannot be split"),
    ("--ring_attn_size 2 --load_in_4bit --bf16 --lora_rank 4", "--load_in_4bit: 4-bit weights cannot be split"),
    ("--nproc 2 --ring_attn_size 2 --attn_implementation eager", "--ring_attn_size works with the attention of this"),
    ("--nproc 8 --ds_tensor_parallel_size 8 --dry_run", "--ds_tensor_parallel_size 8"),  # four heads
    ("--nproc 2 --ring_attn_size 2 --ring_head_stride 3 --dry_run", "--ring_head_stride 3"),  # two heads of keys
    ("--offload_activations", "--offload_activations needs --gradient_checkpointing"),
]


@pytest.mark.parametrize(("words", "line"), MISTAKES)
@pytest.mark.parametrize("verb", ["sft", "dpo", "grpo"])
def test_processes_that_cannot_hold_a_model_are_refused(job, place, verb, words, line):
    before = set(place.iterdir())
    assert job(verb)(*WORDS[verb].split(), *words.split()).mistake.startswith(line)
    assert set(place.iterdir()) == before


@pytest.mark.parametrize("flag", ["--ring_attn_size", "--ds_tensor_parallel_size"])
def test_a_tail_run_splits_neither_rows_nor_layers(job, flag):
    said = job("tail")(*WORDS["tail"].split(), "--nproc", "2", flag, "2").mistake
    assert said == f"{flag}: tail methods split no layers and no rows yet; leave it at 1"
