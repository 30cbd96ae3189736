"""A policy's weights under the names that other engines load them by."""

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import tiny_model
from tests.train.job_run import assert_same_tensors
from trimtab.config.training_options import LoraOptions
from trimtab.models.lora import add_adapters
from trimtab.models.policy import Policy
from trimtab.models.weight_export import WeightExport

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def handed_over(policy: Policy, **how) -> dict[str, torch.Tensor]:
    handover = WeightExport(policy, bf16=False, **how)
    found = dict(handover.tensors())
    told = [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in found.items()]
    assert handover.described() == told
    return found


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen3", "mixtral", "qwen2_moe", "gpt2"])
def test_the_tensors_are_those_of_a_saved_folder(family, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert_same_tensors(handed_over(Policy(model)), saved)


def adapted(family: str = "llama") -> Policy:
    torch.manual_seed(1)
    options = LoraOptions(lora_rank=4, lora_alpha=8, target_modules=("all-linear",))
    policy = Policy(add_adapters(tiny_model(family), options)).eval()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return policy


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2"])
def test_a_model_with_merged_adapters_answers_as_with_them(family, tmp_path):
    policy = adapted(family)
    plain = tiny_model(family)
    found = handed_over(policy)
    missing, unknown = plain.load_state_dict(found, strict=False)
    assert not unknown and {name for name in missing} <= {"lm_head.weight"}
    with torch.no_grad():
        torch.testing.assert_close(plain(IDS).logits, policy.model(IDS).logits, rtol=1e-5, atol=1e-5)
        assert (plain(IDS).logits - tiny_model(family)(IDS).logits).abs().max() > 0.1


def test_adapters_come_under_pefts_names(tmp_path):
    policy = adapted()
    policy.model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert_same_tensors(handed_over(policy, adapters=True), saved)
    config = WeightExport(policy, bf16=False, adapters=True).adapter_config()
    assert (config["r"], config["lora_alpha"]) == (4, 8) and any("q_proj" in m for m in config["target_modules"])


def test_the_weights_are_those_of_the_moment():
    policy = Policy(tiny_model("llama_tied"))
    handover = WeightExport(policy, bf16=True)
    with torch.no_grad():
        policy.inner.get_input_embeddings().weight.fill_(0.5)
    found = dict(handover.tensors())
    embedding = found["model.embed_tokens.weight"]
    assert embedding.dtype == torch.bfloat16 and (embedding == 0.5).all() and "lm_head.weight" not in found
