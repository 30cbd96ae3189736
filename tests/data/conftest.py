import datasets.config
import pytest
from huggingface_hub import constants
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trimtab.data import hub

SPECIAL = [
    *("<pad>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<bos>"),
]
CORPUS = ["The quick brown fox answers: yes, it is four. User: hello Assistant: Hello there! system model user"] * 3


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    """No network and no files outside the test's own folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets-cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "trimtab-cache"))
    hub.hub_reachable.cache_clear()


@pytest.fixture(scope="session")
def _backend():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


@pytest.fixture
def make_tokenizer(_backend):
    """A small byte-level BPE tokenizer with the special tokens of several model families."""

    def make(chat_template=None, eos="</s>"):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(_backend), eos_token=eos, bos_token="<s>", pad_token="<pad>"
        )
        tokenizer.chat_template = chat_template
        return tokenizer

    return make
