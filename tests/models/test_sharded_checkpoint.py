"""A model of which each process reads and writes its parts is, bit for bit, the one that is loaded and saved whole."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests import warm
from tests.models.splitting import (
    borrow,
    compare,
    compare_frozen,
    compare_loaded,
    read_whole,
    refused,
    save,
    save_on_a_full_disk,
    save_over_machines,
)
from tests.rewards.encoder import write_encoder
from tests.train.job_run import assert_same_tensors, write_model
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.models.parallel.sharded_checkpoint import SafetensorsWriter
from trimtab.models.reward import AutoClassifier, rename_head

KINDS = {
    "llama": ("sft", "llama", ""),
    "tied": ("sft", "qwen3", "--zero_stage 2"),
    "lora": ("sft", "llama", "--lora_rank 4"),
    "bf16": ("sft", "llama_tied", "--bf16 --lora_rank 4 --lora_dropout 0.1"),
    "reward": ("rm", "llama", "--lora_rank 2"),
    "renamed head": ("rm", "renamed", "--value_head_prefix value_head"),
    "head without a class": ("rm", "granite", ""),
    "experts": ("sft", "mixtral", ""),
    "few experts": ("sft", "few", ""),
    "experts under adapters": ("sft", "mixtral", "--lora_rank 2 --target_modules q_proj"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "few", "mixtral", num_local_experts=1, num_experts_per_tok=1)
    for family in {family for _, family, _ in KINDS.values()} - {"renamed", "few"}:
        write_model(folder / family, family, **({"tie_word_embeddings": True} if family == "qwen3" else {}))
    llama = AutoModelForSequenceClassification.from_pretrained(folder / "llama", num_labels=1)
    granite = AutoClassifier.from_pretrained(folder / "granite")
    for name, reward in (("renamed", llama), ("granite_reward", granite)):
        reward.save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
    rename_head(folder / "renamed", "score", "value_head")
    write_encoder(folder / "encoder")
    return folder


LONG = ("bf16", "experts", "renamed head")


@pytest.mark.short(3)
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.long] if k in LONG else []) for k in KINDS])
def test_what_is_read_in_parts_is_what_is_loaded_whole_and_split(folder, kind):
    job, family, words = KINDS[kind]
    assert warm.call_world(compare, 2, job, str(folder / family), words) == [0, 0]


@pytest.mark.parametrize(
    ("job", "family", "words"),
    [
        pytest.param("sft", "qwen3", "--bf16", marks=pytest.mark.long),
        ("sft", "mixtral", ""),
        ("sft", "few", ""),
        ("rm", "renamed", "--value_head_prefix value_head --bf16"),
        ("rm", "encoder", ""),
        ("rm", "granite_reward", ""),
    ],
)
def test_a_model_that_only_scores_is_read_in_parts_too(folder, job, family, words):
    assert warm.call_world(compare_frozen, 2, job, str(folder / family), words) == [0, 0]


@pytest.mark.parametrize(
    ("experts", "processes", "words"),
    [(1, 4, "--ds_tensor_parallel_size 2"), pytest.param(4, 3, "", marks=pytest.mark.long)],
)
def test_experts_of_which_a_process_would_get_none_are_read_whole(tmp_path, experts, processes, words):
    write_model(tmp_path, "mixtral", num_local_experts=experts, num_experts_per_tok=1)
    assert warm.call_world(compare_loaded, processes, str(tmp_path), words) == [0] * processes


def test_weights_that_only_the_configuration_ties_are_lent_apart(folder, tmp_path):
    apart = tmp_path / "apart"
    shutil.copytree(folder / "llama_tied", apart)
    tensors = load_file(apart / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).clone()
    save_file(tensors, apart / "model.safetensors", metadata={"format": "pt"})
    for model, parameters in ((folder / "llama_tied", 1), (apart, 2)):
        assert warm.call_world(borrow, 2, str(model), parameters) == [0, 0]


@pytest.mark.parametrize(
    ("family", "name", "change", "expected"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight", None, "1 weights of this model are not in its files, such as"),
        ("llama", "lm_head.weight", 70, r"lm_head.weight has shape \[70, 32\], "),
        ("mixtral", "model.norm.weight", None, "1 weights of this model are not in its files, such as model.norm"),
    ],
)
def test_files_that_do_not_fit_are_refused_in_the_same_line(folder, tmp_path, family, name, change, expected):
    broken = tmp_path / "broken"
    shutil.copytree(folder / family, broken)
    tensors = load_file(broken / "model.safetensors")
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = tensor.new_zeros(change, tensor.shape[1])
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    assert warm.call_world(refused, 2, str(broken), expected) == [0, 0]


def test_pickled_weights_are_read_whole_and_that_is_said(folder, tmp_path):
    pickled = tmp_path / "pickled"
    shutil.copytree(folder / "llama", pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    assert warm.call_world(read_whole, 2, str(pickled)) == [0, 0]


@pytest.mark.parametrize(
    ("job", "family", "words", "file_bytes"),
    [
        ("sft", "qwen3", "", 10**9),
        pytest.param("sft", "llama", "--bf16", 10_000, marks=pytest.mark.long),
        ("sft", "mixtral", "", 60_000),
        ("sft", "few", "", 10**9),
        pytest.param("rm", "llama", "--value_head_prefix value", 10_000, marks=pytest.mark.long),
        ("rm", "renamed", "--value_head_prefix value_head", 10_000),
        ("rm", "llama_tied", "--bf16 --lora_rank 2", 10_000),
        ("rm", "granite_reward", "", 10_000),
    ],
)
def test_what_all_save_together_is_what_one_saves_that_holds_it_whole(folder, tmp_path, job, family, words, file_bytes):
    assert warm.call_world(save, 2, job, str(folder / family), words, tmp_path, file_bytes) == [0, 0]
    split, whole = tmp_path / "split", tmp_path / "whole"
    assert_same_folders(split, whole)
    others = {path.name for path in whole.iterdir() if path.suffix != ".safetensors"}
    assert {path.name for path in split.iterdir() if path.suffix != ".safetensors"} - others <= {INDEX}
    for name in others:
        assert (split / name).read_bytes() == (whole / name).read_bytes(), name


INDEX = "model.safetensors.index.json"


def assert_same_folders(folder, other):
    tensors, expected = tensors_of(folder), tensors_of(other)
    assert_same_tensors(tensors, expected)
    assert all(tensors[name].dtype == expected[name].dtype for name in expected)


def tensors_of(folder):
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: (path.name, tensor) for path in files for name, tensor in load_file(path).items()}
    assert len(files) == 1 or json.loads((folder / INDEX).read_text())["weight_map"] == {
        name: file for name, (file, _) in tensors.items()
    }
    return {name: tensor for name, (_, tensor) in tensors.items()}


def test_a_folder_in_many_files_loads_as_any_other(folder, tmp_path):
    assert warm.call_world(save, 2, "sft", str(folder / "mixtral"), "", tmp_path, 20_000) == [0, 0]
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 2
    loaded, expected = (AutoModelForCausalLM.from_pretrained(p) for p in (tmp_path / "split", folder / "mixtral"))
    assert_same_tensors(loaded.state_dict(), expected.state_dict())


def test_processes_that_do_not_see_the_folder_leave_the_files_to_those_that_do(folder, tmp_path):
    assert warm.call_world(save_over_machines, 2, str(folder / "llama"), tmp_path) == [0, 0]
    assert_same_folders(tmp_path / "split", folder / "llama")
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 2


def test_a_file_whose_header_cannot_be_written_is_not_left_open():
    tensors = {f"a long name {number}": torch.empty(1) for number in range(1000)}
    with pytest.raises(OSError, match="No space left") as kept:  # as whoever reports it keeps it, frames and all
        SafetensorsWriter(Path("/dev/full"), tensors)
    assert kept.tb
    assert not [link for link in Path("/proc/self/fd").iterdir() if os.path.realpath(link) == "/dev/full"]


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_disk_that_is_full_for_one_process_is_told_by_all(folder, tmp_path, full_rank):
    (tmp_path / "out").mkdir()
    assert warm.call_world(save_on_a_full_disk, 2, str(folder / "llama"), tmp_path / "out", full_rank) == [0, 0]
    assert list((tmp_path / "out").iterdir()) == []
