"""A Learner that was saved and loaded goes on as if nothing had been."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import trimtab
from tests.api.learners import PROMPTS, assert_same, copied, judged, learner, weights
from tests.tiny import tiny_model
from trimtab.api.learner import Learner
from trimtab.embedded import bad_word_task

VARIANTS = {
    "module": lambda folder: learner(),
    "module with adapters": lambda folder: learner(lora_rank=4, lora_dropout=0.3),
    "module with tied weights": lambda folder: Learner(tiny_model("llama_tied"), bf16=False, learning_rate=1e-2),
    "module in bf16": lambda folder: learner(bf16=True),
    "folder": lambda folder: Learner(folder / "model", bf16=False, learning_rate=1e-2, seed=3, max_norm=0.5),
    "folder with adapters": lambda folder: Learner(
        folder / "model", bf16=False, learning_rate=1e-2, lora_rank=4, lora_alpha=7, lora_dropout=0.3
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    bad_word_task.write(folder)
    return folder


def one_step(one: Learner) -> None:
    one.forward_backward(judged(one), "reinforce")
    one.optim_step()


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_comes_next_is_the_same_to_the_bit(folder, tmp_path, variant):
    one = VARIANTS[variant](folder)
    one_step(one)
    gathered = judged(one)
    one.forward_backward(gathered[:5])
    one.save(tmp_path / "saved")
    again = Learner.load(tmp_path / "saved")
    assert again.version == 1 and again.options == one.options
    assert_same(weights(one), weights(again))
    for sample, other in zip(one.sample(PROMPTS, 2), again.sample(PROMPTS, 2)):
        assert sample.ids == other.ids and np.array_equal(sample.log_probs, other.log_probs)
    for both in (one, again):
        both.forward_backward(copied(gathered[5:]))  # with what was gathered before
        both.optim_step()
        one_step(both)
    assert_same(weights(one), weights(again))
    for mine, theirs in zip(one.log_probs(gathered, reference=True), again.log_probs(gathered, reference=True)):
        np.testing.assert_array_equal(mine, theirs)


def test_a_folder_is_written_over_only_where_a_learner_lies(folder, tmp_path):
    one = learner()
    one.save(tmp_path / "saved")
    one_step(one)
    one.save(tmp_path / "saved")
    assert Learner.load(tmp_path / "saved").version == 1
    with pytest.raises(trimtab.UserError, match="holds something else"):
        one.save(folder)
    assert (folder / "model").is_dir()


@pytest.mark.parametrize("file", ["state.json", "tensors.safetensors"])
def test_damage_is_named(tmp_path, file):
    learner().save(tmp_path / "saved")
    path = tmp_path / "saved" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(trimtab.UserError, match=r"is damaged|cannot be read"):
        Learner.load(tmp_path / "saved")


def test_other_weights_under_the_same_name_are_refused(tmp_path):
    bad_word_task.write(tmp_path)
    Learner(tmp_path / "model", bf16=False).save(tmp_path / "saved")
    bad_word_task.make_model(seed=1).save_pretrained(tmp_path / "model")
    with pytest.raises(trimtab.UserError, match="has other weights"):
        Learner.load(tmp_path / "saved")


def test_no_option_is_lost(folder, tmp_path):
    Learner(folder / "model", bf16=False, adam_betas=(0.8, 0.9), l2=0.1, pass_tokens=77).save(tmp_path / "saved")
    options = json.loads((tmp_path / "saved" / "state.json").read_text())["options"]
    assert options["adam_betas"] == [0.8, 0.9] and options["pass_tokens"] == 77
    again = Learner.load(tmp_path / "saved")
    assert again.options.adam_betas == (0.8, 0.9) and again._passes.tokens == 77


def test_an_exported_model_says_what_the_learner_says(folder, tmp_path):
    one = Learner(folder / "model", bf16=False, learning_rate=1e-2)
    one_step(one)
    one.export(tmp_path / "model")
    (sample,) = one.sample(["word7"], max_new_tokens=3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    logits = model(torch.tensor([sample.ids])).logits[0, :-1].log_softmax(-1)
    found = logits.gather(-1, torch.tensor(sample.ids)[1:, None])[:, 0].detach().numpy()
    np.testing.assert_allclose(found[sample.trained[1:]], sample.log_probs, rtol=0, atol=1e-5)
    other = Learner(tmp_path / "model", bf16=False)
    assert other.sample(["word7"], seeds=[1])[0].ids == one.sample(["word7"], seeds=[1])[0].ids


def test_a_module_without_a_tokenizer_is_exported_and_adapters_are_an_adapter(tmp_path):
    learner().export(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").is_file()
    learner(lora_rank=4).export(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
