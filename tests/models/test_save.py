import torch
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_model
from trimtab.config.jobs import SFTOptions
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.models.lora import add_adapters
from trimtab.models.policy import Policy
from trimtab.models.save import save_model


def test_a_model_saved_over_an_adapter_is_loaded_without_it(tmp_path):
    tokenizer = make_tokenizer()
    adapted = add_adapters(tiny_model("llama"), SFTOptions(lora_rank=2))
    save_model(Policy(adapted), tokenizer, tmp_path)
    assert (tmp_path / "adapter_config.json").exists()
    model = tiny_model("llama", seed=3)
    save_model(Policy(model), tokenizer, tmp_path)
    assert not list(tmp_path.glob("adapter_*"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(loaded.parameters(), model.parameters()))


def test_saving_twice_replaces_folders_too(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": tokenizer.chat_template, "other": "{{ messages[0].content }}"}
    for _ in range(2):
        save_model(Policy(tiny_model("llama")), tokenizer, tmp_path)
    assert not list(tmp_path.glob(".writing*"))
