"""Heads that are gathered together, and dropout that nobody can draw alone: refused before anything is loaded."""

import pytest
from transformers import GPT2Config, LlamaConfig

from trimtab.config.jobs import DPOOptions, SFTOptions
from trimtab.errors import UserError
from trimtab.models.parallel.sharded_model import check_parallel_options

SIZES = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6}


@pytest.fixture
def model(tmp_path):
    LlamaConfig(**SIZES, attention_dropout=0.1).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("stride", "tensor", "keys", "fits"),
    [(4, 1, "6 heads of keys", 3), (12, 1, "6 heads", 6), (2, 2, "3 heads", 1), (4, 4, "3 heads", 3)],
)
def test_a_stride_that_does_not_divide_the_heads_of_a_process(model, stride, tensor, keys, fits):
    options = SFTOptions(ring_attn_size=2, ring_head_stride=stride, ds_tensor_parallel_size=tensor)
    with pytest.raises(UserError, match=f"^--ring_head_stride {stride} does not divide the {keys}.*: use {fits}$"):
        check_parallel_options(model, options, "--pretrain")
    check_parallel_options(
        model, SFTOptions(ring_attn_size=2, ring_head_stride=fits, ds_tensor_parallel_size=tensor), "--x"
    )


def test_a_model_without_grouped_heads_has_as_many_of_keys(tmp_path):
    GPT2Config(n_head=12, n_embd=96, attn_pdrop=0.0).save_pretrained(tmp_path)
    check_parallel_options(str(tmp_path), SFTOptions(ring_attn_size=2, ring_head_stride=12), "--pretrain")
    with pytest.raises(UserError, match="divide the 12 heads of keys"):
        check_parallel_options(str(tmp_path), SFTOptions(ring_attn_size=2, ring_head_stride=5), "--pretrain")


@pytest.mark.parametrize("how", [{"ring_attn_size": 2}, {"ds_tensor_parallel_size": 2}])
def test_dropped_attention_weights(model, how):
    check_parallel_options(model, DPOOptions(**how), "--pretrain")
    check_parallel_options(model, DPOOptions(keep_dropout=True), "--pretrain")
    check_parallel_options(model, DPOOptions(**how, keep_dropout=True), "--ref_pretrain")
    with pytest.raises(UserError, match=r"^--pretrain .* drops attention weights .*; set attention_dropout to 0"):
        check_parallel_options(model, SFTOptions(**how), "--pretrain")
    with pytest.raises(UserError, match=r"^--keep_dropout: --pretrain .* drops attention weights \(attention_dropout"):
        check_parallel_options(model, DPOOptions(**how, keep_dropout=True), "--pretrain")
