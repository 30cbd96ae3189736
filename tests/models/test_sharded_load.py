"""A model of which each process reads its parts is, bit for bit, the model that is loaded whole and split."""

import pytest

from tests import warm
from tests.models.splitting import compare
from tests.tiny import tiny_model
from trimtab.embedded.sort_task import make_tokenizer

KINDS = {
    "llama": ("sft", "llama", ""),
    "tied": ("sft", "qwen3", "--zero_stage 2"),
    "lora": ("sft", "llama", "--lora_rank 4"),
    "bf16": ("sft", "llama_tied", "--bf16 --lora_rank 4 --lora_dropout 0.1"),
    "reward": ("rm", "llama", "--lora_rank 2"),
    "experts": ("sft", "mixtral", ""),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tokenizer = make_tokenizer()
    for family in {family for _, family, _ in KINDS.values()}:
        tied = {"tie_word_embeddings": True} if family == "qwen3" else {}
        tiny_model(family, vocab_size=len(tokenizer), **tied).save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_in_parts_is_what_is_loaded_whole_and_split(folder, kind):
    job, family, words = KINDS[kind]
    assert warm.call_world(compare, 2, job, str(folder / family), words) == [0, 0]
