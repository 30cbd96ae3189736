"""A frozen model that will be bf16 is read as that at once, and is to the bit what it is when it is read in fp32."""

import pytest
import torch

from tests.tiny import tiny_model
from trimtab.config.rl_jobs import RLOptions
from trimtab.distributed.device import find_device
from trimtab.models import load

FAMILIES = ("llama", "gpt2", "gemma2", "qwen2", "qwen3", "mistral", "opt")


def both(monkeypatch, read):
    """Read by way of fp32, and at once; with the random state behind."""
    found = []
    for at_once in (False, True):
        with monkeypatch.context() as patch:
            if not at_once:
                patch.setattr(load, "begin_sharded_load", lambda *given, **more: None)
            torch.manual_seed(1)
            found.append((read(), torch.get_rng_state()))
    return found


@pytest.mark.parametrize(
    "family, dtype",
    [("llama", torch.float32), *(pytest.param(f, torch.bfloat16, marks=pytest.mark.long) for f in FAMILIES)],
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rank", [0, 4])
def test_what_is_read_rounded_is_what_is_rounded_after_reading(family, dtype, tied, rank, tmp_path, monkeypatch):
    tiny_model(family, tie_word_embeddings=tied).to(dtype).save_pretrained(tmp_path)
    options = RLOptions(pretrain=str(tmp_path), bf16=True, lora_rank=rank, target_modules=["all-linear"])

    def read():
        if rank:
            return load.load_policy(options, find_device())
        return load.load_frozen_policy(str(tmp_path), options, find_device())

    (before, state), (after, other_state) = both(monkeypatch, read)
    for kind in ("named_parameters", "named_buffers"):
        expected, found = (dict(getattr(loaded.model, kind)()) for loaded in (before, after))
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), name
            assert tensor.requires_grad == found[name].requires_grad
    assert torch.equal(state, other_state)
    assert (before.weights, before.verdict.path) == (after.weights, after.verdict.path)
    assert before.model.training == after.model.training
    one, other = before.model.inner, after.model.inner
    assert one.config._attn_implementation == other.config._attn_implementation
    assert one.generation_config.to_dict() == other.generation_config.to_dict()
    assert (one.get_input_embeddings().weight is one.get_output_embeddings().weight) == tied
    assert (other.get_input_embeddings().weight is other.get_output_embeddings().weight) == tied


def test_no_fp32_weights_are_made_on_the_way(tmp_path, monkeypatch):
    tiny_model().save_pretrained(tmp_path)
    options = RLOptions(pretrain=str(tmp_path), bf16=True)

    def refuse(*given, **more):
        raise AssertionError("read by way of fp32")

    monkeypatch.setattr(load, "_load_whole", refuse)
    assert load.load_frozen_policy(str(tmp_path), options, find_device()).model.path == "packed"


def test_what_must_be_converted_is_left_to_its_loader(tmp_path):
    tiny_model("mixtral").save_pretrained(tmp_path)
    source = load._open_model(str(tmp_path), RLOptions(bf16=True), find_device(), "--pretrain", None, direct=True)
    assert source.files is None
