"""A merged model answers and scores like its base with the adapter on."""

import json
import os
import pickle
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.train.job_run import make_run, preference_rows, write_model, write_rows
from trimtab.config.jobs import RMOptions, SFTOptions
from trimtab.embedded.sort_task import make_rows
from trimtab.errors import UserError
from trimtab.models.reward import AutoClassifier
from trimtab.models.save import merge_adapter, save_model
from trimtab.train.supervised_tasks import RMTask, SFTTask

IDS = torch.tensor([[3, 9, 14, 30, 4, 41, 22, 1]])


def write_adapter(folder, kind="sft", family="llama"):
    """`folder`/model and `folder`/adapter, whose weights are far from their start."""
    write_model(folder / "model", family)
    write_rows(folder / "train.jsonl", make_rows(2, seed=1) if kind == "sft" else preference_rows(2))
    job = (SFTOptions, SFTTask) if kind == "sft" else (RMOptions, RMTask)
    columns = "--input_key messages" if kind == "sft" else ""
    batches = "--train_batch_size 2 --micro_train_batch_size 2"
    run = make_run(*job, folder, f"--apply_chat_template {columns} {batches} --lora_rank 4")
    with torch.no_grad():
        for parameter in run.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1)
    save_model(run.model, run.tokenizer, folder / "adapter")


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    folder = tmp_path_factory.mktemp("causal")
    write_adapter(folder)
    return folder


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    write_adapter(folder, "rm")
    (folder / "adapter" / "rewards.json").write_text(json.dumps({"mean": 0.5, "std": 2.0}))
    return folder


def merge(folder, name="merged", **how):
    merge_adapter(str(folder / "model"), str(folder / "adapter"), str(folder / name), **how)
    return folder / name


def outputs(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def adapted(loader, folder, **more):
    base = loader.from_pretrained(folder / "model", **more)
    before = outputs(base)
    after = outputs(PeftModel.from_pretrained(base, folder / "adapter"))
    assert (after - before).abs().max() > 0.1, "the adapter does something"
    return after


@pytest.mark.parametrize("family", ["llama_tied", "gpt2", "mixtral"])
def test_a_merged_models_logits_are_those_of_the_adapter(tmp_path, family):
    """Tied embeddings, a model whose layers keep their matrices the other way round, and one with experts."""
    write_adapter(tmp_path, family=family)
    merged = AutoModelForCausalLM.from_pretrained(merge(tmp_path))
    expected = adapted(AutoModelForCausalLM, tmp_path)
    torch.testing.assert_close(outputs(merged), expected, atol=1e-5, rtol=1e-5)


def test_a_merged_reward_models_scores_are_those_of_the_adapter(reward):
    folder = merge(reward, is_rm=True)
    merged = AutoModelForSequenceClassification.from_pretrained(folder)
    expected = adapted(AutoModelForSequenceClassification, reward, num_labels=1)
    assert expected.shape == (1, 1)
    torch.testing.assert_close(outputs(merged), expected, atol=1e-5, rtol=1e-5)
    assert (merged.config.mean, merged.config.std) == (0.5, 2.0)
    assert merged.config.pad_token_id == AutoTokenizer.from_pretrained(folder).pad_token_id is not None


def test_a_reward_model_whose_class_transformers_does_not_have_is_merged_too(tmp_path):
    write_adapter(tmp_path, "rm", "granite")
    merged = AutoClassifier.from_pretrained(merge(tmp_path, is_rm=True))
    expected = adapted(AutoClassifier, tmp_path)
    torch.testing.assert_close(outputs(merged), expected, atol=1e-5, rtol=1e-5)


def test_bf16_is_the_fp32_sum_rounded_once(causal):
    full = load_file(merge(causal, "full") / "model.safetensors")
    half = load_file(merge(causal, "half", bf16=True) / "model.safetensors")
    assert full.keys() == half.keys() and not any("lora" in name for name in full)
    for name, tensor in full.items():
        assert tensor.dtype == torch.float32 and half[name].dtype == torch.bfloat16
        assert torch.equal(tensor.bfloat16(), half[name]), name
    assert AutoModelForCausalLM.from_pretrained(causal / "half").dtype == torch.bfloat16


def mistake(*places, **how):
    with pytest.raises(UserError) as caught:
        merge_adapter(*map(str, places), **how)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_adapter_of_the_other_kind_is_refused(causal, reward, tmp_path):
    found = mistake(reward / "model", reward / "adapter", tmp_path / "out")
    assert found.endswith("the adapter of a reward model; add --is_rm")
    found = mistake(causal / "model", causal / "adapter", tmp_path / "out", is_rm=True)
    assert found.endswith("the adapter of a language model; drop --is_rm")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "family, changes", [("llama", {"hidden_size": 64}), ("llama", {"num_hidden_layers": 1}), ("gpt2", {})]
)
def test_an_adapter_of_another_model_is_refused(causal, tmp_path, family, changes):
    write_model(tmp_path / "other", family, **changes)
    found = mistake(tmp_path / "other", causal / "adapter", tmp_path / "out")
    assert found.startswith(f"--lora_path {causal}/adapter: does not fit --model_path {tmp_path}/other")
    assert not (tmp_path / "out").exists()


def test_places_that_hold_something_else_are_named(causal, tmp_path):
    assert "--model_path" in mistake(tmp_path / "nothing", causal / "adapter", tmp_path / "out")
    assert "no adapter_config.json there" in mistake(causal / "model", causal / "model", tmp_path / "out")
    (tmp_path / "adapter_config.json").write_text("{broken")
    assert "not readable as JSON" in mistake(causal / "model", tmp_path, tmp_path / "out")


def test_a_pickled_adapter_is_refused_in_one_line_and_runs_nothing(causal, tmp_path):
    shutil.copytree(causal / "adapter", tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with (tmp_path / "adapter" / "adapter_model.bin").open("wb") as file:
        pickle.dump(Hostile(str(tmp_path / "ran")), file)
    with pytest.raises(UserError, match="--lora_path") as error:
        merge_adapter(str(causal / "model"), str(tmp_path / "adapter"), str(tmp_path / "merged"))
    assert "\n" not in str(error.value) and not (tmp_path / "ran").exists()


class Hostile:
    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (self.place,)
