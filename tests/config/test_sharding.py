"""Which meshes there are, and which there cannot be, said before anything is loaded."""

import pytest

from tests.config.every_job import RL, SFT, lines_of, refusal
from trimtab.config.placement_options import ShardingOptions
from trimtab.errors import UserError


@pytest.mark.parametrize(
    "words, line",
    [
        ("--nproc 3 --shard_size 2", "--shard_size 2 must divide 3 processes"),
        ("--nproc 2 --shard_size 4", "--shard_size 4 must divide 2 processes"),
        ("--nproc 4 --shard_size 2 --zero_stage 0", "--shard_size splits what --zero_stage 0 does not: leave it out"),
        ("--nproc 4 --shard_size 0", "--shard_size is 0: it must be at least 1"),
        ("--nproc 6 --zpg 4 --zero_stage 3", "--zpg 4 must divide the 6 processes that parameters are split over"),
        ("--nproc 4 --zpg 4 --zero_stage 3", "--zpg 4 must divide the 4 processes that parameters are split over"),
        ("--nproc 4 --zpg 2 --shard_size 2 --zero_stage 3", "--zpg 2 must divide the 2 processes"),
        ("--nproc 4 --zpg 2", "--zpg keeps split what --zero_stage 2 does not split: use --zero_stage 3"),
        ("--nproc 3 --ring_attn_size 2", "--ring_attn_size 2: 3 processes cannot be shared out so"),
        ("--nproc 2 --ring_attn_size 2 --attn_implementation sdpa", "--ring_attn_size works with the attention of"),
        ("--nproc 2 --ring_attn_size 2 --ring_head_stride 0", "--ring_head_stride is 0: it must be at least 1"),
        ("--nproc 2 --load_in_4bit --bf16 --lora_rank 4", "--load_in_4bit: 4-bit weights cannot be split"),
        ("--ring_attn_size 2 --load_in_4bit --bf16 --lora_rank 4", "--load_in_4bit: 4-bit weights cannot be split"),
        ("--nproc 3 --ds_tensor_parallel_size 2", "--ds_tensor_parallel_size 2: 3 processes cannot be shared out so"),
        (
            "--nproc 6 --ring_attn_size 2 --ds_tensor_parallel_size 2",
            "--ring_attn_size 2 x --ds_tensor_parallel_size 2",
        ),
        ("--nproc 4 --ring_attn_size 2 --shard_size 1", "--shard_size 1 must divide 4 processes and be a multiple of"),
        ("--nproc 8 --zpg 2 --zero_stage 3 --ds_tensor_parallel_size 2", "--zpg and --ds_tensor_parallel_size do not"),
        (
            "--nproc 2 --ring_attn_size 2 --attn_implementation eager",
            "--ring_attn_size works with the attention of this",
        ),
        ("--offload_activations", "--offload_activations needs --gradient_checkpointing"),
    ],
)
@pytest.mark.parametrize("verb", ["sft", "dpo", "ppo"])
def test_processes_that_cannot_be_shared_out_so_are_refused_in_one_line(verb, words, line):
    assert refusal(lines_of, verb, f"{SFT if verb != 'ppo' else RL} {words}").startswith(line)


@pytest.mark.parametrize(
    "changes, processes, sizes",
    [
        ({}, 4, {}),
        ({"zero_stage": 0}, 4, {"replicate": 4}),
        ({"shard_size": 2}, 4, {"replicate": 2}),
        ({"zero_stage": 3, "zpg": 2}, 4, {"neighbours": 2}),
        ({"zero_stage": 3, "zpg": 2, "shard_size": 4}, 8, {"replicate": 2, "neighbours": 2}),
        ({"shard_size": 2, "ds_tensor_parallel_size": 2}, 8, {"replicate": 2, "tensor": 2}),
        ({"shard_size": 2, "ring_attn_size": 2}, 8, {"replicate": 4, "context": 2}),
    ],
)
def test_a_mesh_has_the_dimensions_that_are_asked_for(changes, processes, sizes):
    found = ShardingOptions(**changes).mesh_sizes(processes)
    assert found == {"replicate": 1, "context": 1, "tensor": 1, "neighbours": 1, **sizes}


def test_a_model_that_only_scores_may_be_in_fewer_processes():
    options = ShardingOptions(zero_stage=3, zpg=2, shard_size=4)
    assert options.mesh_sizes(2, learns=False) == {"replicate": 1, "context": 1, "tensor": 1, "neighbours": 1}
    assert options.mesh_sizes(8, learns=False)["replicate"] == 2
    with pytest.raises(UserError, match="--shard_size 4 must divide 2"):
        options.mesh_sizes(2)
