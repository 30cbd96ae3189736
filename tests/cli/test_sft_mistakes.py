"""Bad input of every kind: one line that says what to mend, exit code 2, and nothing left behind."""

import os
import re
import shutil
import socket
import time
from functools import partial

import datasets.config
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from tests.cli.sft_job import conversation, write_model, write_rows
from trimtab.config import resolved_config as support
from trimtab.config.jobs import SFTOptions
from trimtab.data import hub
from trimtab.distributed.device import find_device
from trimtab.errors import UserError
from trimtab.models.load import load_policy

DATA = ("--dataset", "train.jsonl", "--max_len", "40")
MODEL = ("--pretrain", "model")
PLACES = ("--save_path", "out", "--ckpt_path", "out/checkpoints")


@pytest.fixture
def refused(refused_alike):
    """What SFT with these words is refused with; where they do not differ, model, data and places are right."""
    return partial(refused_alike, "sft", *MODEL, *PLACES, *DATA)


# ---- data


def test_malformed_json_names_file_and_line(refused, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n{"messages": []}\n{"messages": [\n')
    assert "rows.jsonl, line 3: malformed JSON" in refused("--dataset", "rows.jsonl")


@pytest.mark.parametrize(
    "keys, missing",
    [("", "input"), ("--input_key prompt", "prompt"), ("--input_key question --output_key answer", "answer")],
)
def test_a_missing_column_lists_those_found(refused, tmp_path, keys, missing):
    write_rows(tmp_path / "rows.jsonl", [{"question": "2", "response": "2"}])
    line = refused("--dataset", "rows.jsonl", *keys.split())
    assert f"no column '{missing}'" in line and line.endswith("found question, response")


def test_nothing_left_after_filtering(refused):
    line = refused("--dataset", "train.jsonl", "--max_len", "5")
    assert "no row of the train data is left: of 16, 16 have nothing to learn within 5 tokens" in line


def test_some_rows_over_long_are_counted_and_reported(sft, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [conversation("a", "b"), conversation("a" * 50, "b")])
    ran = sft(*MODEL, *PLACES, "--dataset", "rows.jsonl", "--max_len", "20")
    assert ran.code == 0 and "1 of 2 rows" in ran.out
    assert "1 rows left out: nothing to learn within 20 tokens" in ran.out


def test_conversations_without_a_chat_template(refused, tmp_path):
    (write_model(tmp_path / "plain") / "chat_template.jinja").unlink()
    line = refused("--pretrain", "plain")
    assert "no chat template" in line and "--tokenizer_chat_template" in line


def test_a_hub_name_without_network(refused):
    line = refused("--dataset", "owner/data")
    assert "cannot load 'owner/data'" in line and "hub cannot be reached" in line


# ---- models


@pytest.mark.parametrize(
    "removed, said",
    [
        (["model.safetensors"], "no weights"),
        (["config.json"], "no config.json"),
        (["tokenizer.json", "tokenizer_config.json"], "no tokenizer.json"),
    ],
)
def test_a_folder_that_lacks_a_part(refused, tmp_path, removed, said):
    shutil.copytree(tmp_path / "model", tmp_path / "part")
    for name in removed:
        (tmp_path / "part" / name).unlink()
    line = refused("--pretrain", "part")
    assert line.startswith("--pretrain part: ") and said in line


def keep_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    "spoil", [keep_half, lambda path: path.write_bytes(b"\0" * 500), lambda path: path.write_bytes(b"")]
)
def test_a_damaged_file_is_named(refused, tmp_path, name, spoil):
    shutil.copytree(tmp_path / "model", tmp_path / "damaged")
    spoil(tmp_path / "damaged" / name)
    line = refused("--pretrain", "damaged")
    assert name in line and "damaged" in line


def test_a_missing_shard_is_named(refused, tmp_path):
    write_model(tmp_path / "sharded")
    weights = tmp_path / "sharded" / "model.safetensors"
    names = load_file(weights)
    weights.unlink()
    save_file({name: value for name, value in names.items()}, tmp_path / "sharded" / "model-00001-of-00002.safetensors")
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(index)
    assert "model-00002-of-00002.safetensors: damaged or missing" in refused("--pretrain", "sharded")


def test_weights_that_are_missing_are_not_drawn_at_random(refused, tmp_path):
    path = write_model(tmp_path / "half") / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if "layers.1." not in k}, path, metadata={"format": "pt"})
    line = refused("--pretrain", "half", dry=False)
    assert "9 weights of this model are not in its files, such as model.layers.1." in line


def test_weights_of_another_shape(refused, tmp_path):
    path = write_model(tmp_path / "misshapen") / "model.safetensors"
    save_file({**load_file(path), "model.norm.weight": torch.ones(7)}, path, metadata={"format": "pt"})
    line = refused("--pretrain", "misshapen", dry=False)
    assert "model.norm.weight has shape [7], [32] is needed" in line


def test_a_tokenizer_of_another_model(refused, tmp_path):
    write_model(tmp_path / "narrow", vocab_size=20)
    assert "the model knows only 20 tokens" in refused("--pretrain", "narrow")


def test_a_model_on_the_hub_without_network(refused):
    line = refused("--pretrain", "owner/model")
    assert "'owner/model'" in line and "hub cannot be reached" in line
    with pytest.raises(UserError, match=r"--pretrain owner/model: .*hub cannot be reached"):
        load_policy(SFTOptions(pretrain="owner/model"), find_device())


def test_a_network_that_swallows_questions_is_noticed_in_time(refused, monkeypatch):
    def hang(*_, **__):
        time.sleep(5)
        raise OSError("no name server")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(hub, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    hub.hub_reachable.cache_clear()
    began = time.monotonic()
    try:
        assert "hub cannot be reached" in refused("--pretrain", "owner/model")
        assert "hub cannot be reached" in refused("--dataset", "owner/data")
    finally:
        hub.hub_reachable.cache_clear()
    assert time.monotonic() - began < 4


def test_target_modules_that_match_nothing(refused):
    line = refused("--lora_rank", "4", "--target_modules", "q_prj", "k_prj")
    assert "--target_modules q_prj k_prj: no such layers" in line and "q_proj" in line


def test_a_router_loss_for_a_dense_model(refused):
    assert "--aux_loss_coef 0.01: LlamaForCausalLM has no experts" in refused("--aux_loss_coef", "0.01")


def test_four_bits_without_the_package(refused, monkeypatch):
    monkeypatch.setattr(support, "find_spec", lambda module: None)
    line = refused("--load_in_4bit", "--bf16", "--lora_rank", "4", dry=False)
    assert line.startswith("--load_in_4bit needs the package bitsandbytes: pip install")


# ---- places


@pytest.mark.parametrize("flag", ["--save_path", "--ckpt_path", "--use_tensorboard"])
@pytest.mark.parametrize("below", ["", "/folder"])
def test_a_place_that_is_a_file(refused, tmp_path, flag, below):
    (tmp_path / "taken").write_text("")
    line = refused(flag, f"taken{below}")
    assert line == f"{flag} taken{below}: taken is a file; give a folder"


def test_a_place_that_is_not_ours(refused, tmp_path, monkeypatch):
    (tmp_path / "theirs").mkdir()
    # Permissions do not hold root back, so the question is answered here.
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "theirs")
    line = refused("--save_path", "theirs/mine")
    assert line == "--save_path theirs/mine: you may not write in theirs; choose another folder"


def test_a_disk_that_refuses_only_when_written_to(sft):
    line = sft(*MODEL, *DATA, "--save_path", "/proc/model", "--ckpt_path", "out").mistake
    assert re.match(r"--save_path /proc/model: cannot write there \(.+\)", line)


def test_a_model_that_cannot_be_saved_at_the_end(sft, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trimtab.train.supervised.save_model", full)
    ran = sft(*MODEL, *PLACES, *DATA)
    assert ran.code == 2 and "--save_path out: cannot write the model (No space left on device)" in ran.err
    assert not (tmp_path / "out" / "config.json").exists()


# ---- checkpoints


@pytest.fixture
def checkpointed(sft, tmp_path):
    """The words of a run that left a checkpoint, here with LoRA."""
    words = (*MODEL, *DATA, *PLACES, "--train_batch_size", "8", "--save_steps", "2", "--lora_rank", "4")
    assert sft(*words).code == 0
    return words


@pytest.mark.parametrize(
    "changed, said",
    [
        (("--pretrain", "other"), "belongs to another model (its initial weights differ"),
        (("--dataset", "other.jsonl"), "was trained on other data"),
        (("--train_batch_size", "16"), "was trained on other data, or in another order"),
        (("--seed", "7"), "was trained on other data, or in another order"),
        (("--lora_rank", "8"), "belongs to another model (other trained parameters: check the LoRA options)"),
        (("--lora_rank", "0"), "belongs to another model (other trained parameters"),
    ],
)
def test_a_checkpoint_of_another_run(sft, checkpointed, tmp_path, changed, said):
    write_rows(tmp_path / "other.jsonl", [conversation("sort 21>", "12")] * 16)
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    line = sft(*checkpointed, "--load_checkpoint", *changed).mistake
    assert line.startswith("--ckpt_path out/checkpoints/global_step4: this checkpoint ") and said in line
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


def test_the_same_run_does_resume(sft, checkpointed):
    ran = sft(*checkpointed, "--load_checkpoint")
    assert ran.code == 0 and "resumed from out/checkpoints/global_step4 at step 4" in ran.out


def test_a_damaged_checkpoint_is_named_and_passed_over(sft, checkpointed, tmp_path):
    keep_half(tmp_path / "out" / "checkpoints" / "global_step4" / "tensors.safetensors")
    ran = sft(*checkpointed, "--load_checkpoint")
    assert ran.code == 0 and "global_step4: damaged checkpoint" in ran.out
    assert "resumed from out/checkpoints/global_step2 at step 2" in ran.out
