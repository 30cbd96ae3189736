"""A model whose layers are cut over processes is the model that one process holds."""

from functools import cache

import pytest
import torch

from tests import warm
from tests.models.cutting import compare_heads, compare_with_one_process, plant_faults
from tests.models.splitting import compare, compare_frozen, save
from tests.models.test_sharded_checkpoint import assert_same_folders
from tests.tiny import tiny_model
from trimtab.embedded.sort_task import make_tokenizer

WORDS = len(make_tokenizer())
MODELS = {
    "llama": ("llama", {}),
    "tied": ("llama_tied", {"vocab_size": WORDS | 1}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"vocab_size": WORDS | 1}),
    "gemma3": ("gemma3_text", {}),
    "mixtral": ("mixtral", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "one key": ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "three keys": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}),
    "uneven": ("llama", {"intermediate_size": 63, "vocab_size": WORDS | 1}),
}
ATTENTION = "--target_modules q_proj k_proj v_proj o_proj"
SHORT = [
    ("sft", "qwen3", ""),
    ("sft", "mixtral", ""),
    ("sft", "one key", "--lora_rank 4"),
    ("sft", "gemma2", ""),
    ("sft", "llama", "--lora_rank 4 --lora_dropout 0.2 --gradient_checkpointing"),
]
LONG = [
    *(("sft", model, "") for model in MODELS),
    *(("sft", model, f"--lora_rank 4 --lora_dropout 0.1 {ATTENTION}") for model in MODELS),
    ("sft", "llama", "--zero_stage 0"),
    ("sft", "tied", "--zero_stage 2 --lora_rank 4"),
    ("rm", "llama", ""),
    ("rm", "mixtral", f"--lora_rank 2 {ATTENTION}"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model, written when it is asked for."""

    @cache
    def written(name):
        place = tmp_path_factory.mktemp(name.replace(" ", "_"))
        write(place, *MODELS[name])
        return str(place)

    return written


def write(place, family, changes):
    model = tiny_model(family, **{"vocab_size": WORDS, **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases that are not all alike
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name.endswith("mlp.gate.weight"):
                parameter.mul_(5)  # so that no rounding sends a token to other experts
    model.save_pretrained(place)
    make_tokenizer().save_pretrained(place)


def placed(model, cases):
    return [(job, model(name), words) for job, name, words in cases]


def test_gradients_are_those_of_one_process(model):
    assert warm.call_world(compare_with_one_process, 2, placed(model, SHORT)) == [0, 0]


@pytest.mark.long
def test_gradients_of_every_family_are_those_of_one_process(model):
    assert warm.call_world(compare_with_one_process, 2, placed(model, LONG)) == [0, 0]


@pytest.mark.long
def test_layers_that_are_cut_are_split_too(model):
    """Two processes for every layer, and two for samples."""
    assert warm.call_world(compare_with_one_process, 4, placed(model, LONG)) == [0] * 4


@pytest.mark.long
def test_rows_are_shared_by_processes_whose_layers_are_cut(model):
    names = ("llama", "qwen3", "gemma2", "mixtral", "one key", "three keys")
    cases = [("sft", name, "--ring_attn_size 2") for name in names] + [("rm", "qwen3", "--ring_attn_size 2")]
    assert warm.call_world(compare_with_one_process, 4, placed(model, cases)) == [0] * 4


@pytest.mark.long
def test_mistakes_are_noticed(model):
    models = [model(name) for name in ("qwen3", "one key", "mixtral", "llama", "three keys")]
    assert warm.call_world(plant_faults, 2, *models) == [0, 0]


def test_a_head_that_is_cut_says_what_a_whole_one_says():
    assert warm.call_world(compare_heads, 2) == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize(
    ("job", "name", "words"),
    [
        ("sft", "mixtral", ""),
        ("sft", "tied", "--bf16 --lora_rank 4"),
        ("sft", "qwen3", "--zero_stage 0"),
        ("rm", "one key", "--lora_rank 2"),
    ],
)
def test_what_is_read_in_parts_is_what_is_loaded_whole_and_cut(model, processes, job, name, words):
    words = f"{words} --ds_tensor_parallel_size 2"
    assert warm.call_world(compare, processes, job, model(name), words) == [0] * processes


@pytest.mark.long
@pytest.mark.parametrize(("job", "name", "words"), [("sft", "mixtral", "--bf16"), ("sft", "qwen3", "")])
def test_a_model_that_only_scores_is_cut_too(model, job, name, words):
    words = f"{words} --ds_tensor_parallel_size 2"
    assert warm.call_world(compare_frozen, 4, job, model(name), words) == [0] * 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "name", "words"),
    [("sft", "mixtral", ""), ("sft", "tied", "--bf16"), ("sft", "one key", "--lora_rank 4"), ("rm", "qwen3", "")],
)
def test_a_model_that_is_cut_is_saved_as_one_that_is_whole(model, tmp_path, job, name, words):
    words = f"{words} --ds_tensor_parallel_size 2"
    assert warm.call_world(save, 4, job, model(name), words, tmp_path, 10_000) == [0] * 4
    assert_same_folders(tmp_path / "split", tmp_path / "whole")
