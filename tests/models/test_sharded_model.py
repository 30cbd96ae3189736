"""Models that cannot be split as the options say are refused from their configuration, in one line."""

from types import SimpleNamespace

import pytest
from transformers import AutoConfig, GPT2Config, LlamaConfig

from tests.tiny import tiny_model
from trimtab.config.jobs import DPOOptions, SFTOptions
from trimtab.config.parser import parse
from trimtab.errors import UserError
from trimtab.models.parallel.sharded_model import check_parallel_options
from trimtab.models.parallel.tensor_parallel import FAMILIES, key_value_heads_used
from trimtab.train.supervised import build_run, dry_run_supervised


def write(folder, family, **changes):
    if family == "gpt2":
        GPT2Config(n_head=4, n_embd=32).save_pretrained(folder)
    else:
        tiny_model(family, **changes).config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("family", "changes", "parts", "expected"),
    [
        ("gpt2", {}, 2, "layers of a gpt2 model cannot be cut; of llama, mistral, .*, qwen3_moe models they can$"),
        ("llama", {}, 3, "its 4 attention heads cannot be shared out to 3 processes, but to 2 or 4$"),
        ("mixtral", {"intermediate_size": 63}, 2, "its experts are 63 wide, which 2 processes cannot share$"),
        ("qwen2_moe", {"moe_intermediate_size": 31}, 2, "its experts are 31 wide"),
        ("llama", {"vocab_size": 5}, 4, "its vocabulary of 5 cannot be shared out to 4 processes$"),
    ],
)
def test_a_model_that_cannot_be_cut(tmp_path, family, changes, parts, expected):
    model = write(tmp_path, family, **changes)
    check_parallel_options(model, SFTOptions(), "--pretrain")
    with pytest.raises(UserError, match=rf"^--ds_tensor_parallel_size {parts}: --ref_pretrain {model}: {expected}"):
        check_parallel_options(model, SFTOptions(ds_tensor_parallel_size=parts), "--ref_pretrain")


def test_adapters_on_what_is_cut_by_vocabulary(tmp_path):
    options = SFTOptions(ds_tensor_parallel_size=2, lora_rank=4, target_modules=("q_proj", "lm_head"))
    with pytest.raises(UserError, match=r"--target_modules lm_head: a layer cut by vocabulary takes no adapter$"):
        check_parallel_options(write(tmp_path, "llama"), options, "--pretrain")


@pytest.mark.parametrize(
    "begin", [dry_run_supervised, lambda options: build_run(options, None, None, SimpleNamespace(size=3))]
)
def test_nothing_is_loaded_before(tmp_path, begin):
    """Neither data nor a tokenizer, which are not there."""
    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)
    words = f"--pretrain {folder} --dataset none --save_path {tmp_path}/out --ds_tensor_parallel_size 3"
    with pytest.raises(UserError, match="its 4 attention heads cannot be shared out to 3 processes"):
        begin(parse(SFTOptions, words.split()))


def test_the_families_are_those_of_hugging_face():
    for family in FAMILIES:
        assert AutoConfig.for_model(family).num_key_value_heads is not None


@pytest.mark.parametrize(
    ("heads", "keys", "parts", "expected"),
    [
        (4, 1, 2, [[0], [0]]),
        (8, 2, 4, [[0], [0], [1], [1]]),
        (12, 3, 2, [[0, 0, 0, 0, 1, 1], [1, 1, 2, 2, 2, 2]]),
        (6, 3, 2, [[0, 0, 1], [1, 2, 2]]),
    ],
)
def test_heads_of_queries_find_their_keys(heads, keys, parts, expected):
    """In attention, queries h of H read keys h * K // H of the K heads that are here."""
    for part in range(parts):
        used, own = key_value_heads_used(heads, keys, parts, part), heads // parts
        assert used == expected[part]
        assert own % len(used) == 0
        read = [used[h * len(used) // own] for h in range(own)]
        assert read == [(part * own + h) * keys // heads for h in range(own)]


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
