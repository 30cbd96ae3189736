"""Whole runs in one process with a vLLM engine, through the command."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.train.rl.async_run import AHEAD, check_ledger
from tests.train.rl.rl_run import arguments, rows, write_task
from tests.vllm.conftest import SIZES
from trimtab.rollout.vllm.engine import VLLMEngine
from trimtab.train.metrics import read_rows
from trimtab.train.rl.experience import Experience

SHORT = "--rollout_engine vllm --rollout_slots 16 --max_steps 2 --enable_prefix_caching"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def task(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    return request.param, write_task(folder, tie_word_embeddings=request.param, **SIZES)


@pytest.fixture
def tied_task(tmp_path):
    return write_task(tmp_path, tie_word_embeddings=True, **SIZES)


def test_grpo_learns_from_answers_of_a_vllm_engine(task, tmp_path, in_command, capsys):
    _, folder = task
    assert in_command(arguments(folder, tmp_path / "out", "grpo", SHORT, "--enable_ema")) == 0
    found = rows(tmp_path / "out")
    assert [row["step"] for row in found] == [0, 1, 2]
    assert all(row["log_prob_gap"] < 1e-4 and abs(row["correction"] - 1) < 1e-3 for row in found[1:])
    assert found[2]["policy_kl"] > 1e-3  # it has moved
    assert "--mismatch_correction tis" in capsys.readouterr().err


def test_with_a_penalty_and_a_least_length_the_correction_is_for_what_was_drawn_from(tied_task, tmp_path, in_command):
    """The ratio is that of the policy with itself, 1 while nothing is learnt; the engine's share is the correction."""
    drawn = "--generate_min_len 9 --repetition_penalty 1.5 --actor_learning_rate 0 --save_rollouts 64"
    assert in_command(arguments(tied_task, tmp_path / "out", "grpo", SHORT, drawn, "--max_steps 1")) == 0
    row = rows(tmp_path / "out")[1]
    assert row["policy_kl"] < 1e-6 and row["clip_fraction"] == 0
    assert (
        row["log_prob_gap"] > 0.01 and 0.5 < row["correction"] < 1.5 and row["correction"] != pytest.approx(1, abs=1e-3)
    )
    kept = read_rows(tmp_path / "out" / "rollouts.jsonl")
    assert min(answer["tokens"] for answer in kept if answer["step"] == 1) >= 9


def test_answers_outlive_updates_and_every_token_has_the_log_prob_of_the_weights_that_drew_it(
    tied_task, tmp_path, in_command, monkeypatch
):
    sent, take = {}, VLLMEngine.weights_changed

    def weights_changed(engine, version):
        take(engine, version)
        sent[version] = {name: tensor.clone() for name, tensor in engine.weights.tensors()}

    monkeypatch.setattr(VLLMEngine, "weights_changed", weights_changed)
    more = "--rollout_engine vllm --partial_rollout --save_steps -1"
    record = f"--record {tmp_path}/recording --init_kl_coef 0"
    assert in_command(arguments(tied_task, tmp_path / "out", "grpo", AHEAD, more, record)) == 0
    check_ledger(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tied_task / "model")
    sent[0] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    answers = [answer for path in sorted((tmp_path / "recording").iterdir()) for answer in recorded(path)]
    assert max(len(set(versions.tolist())) for _, _, versions, _ in answers) > 1
    for version, tensors in sent.items():
        model.load_state_dict(tensors, strict=False)  # what is tied goes once
        for prompt, ids, versions, log_probs in answers:
            own = versions == version
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(log_probs[own], expected[own], atol=1e-3, rtol=0)


def recorded(path):
    """Prompt, answer, and of the answer's tokens versions and log-probs."""
    experience = Experience.from_tensors(load_file(path))
    for i in range(len(experience)):
        tokens = experience.tokens_of([i])
        yield experience.prompt(i), experience.response(i), experience.versions_N[tokens], experience.sampled_N[tokens]


@pytest.mark.parametrize("way", ["adapter", "merged"])
def test_grpo_with_lora(way, tied_task, tmp_path, in_command):
    out = tmp_path / "out"
    words = arguments(tied_task, out, "lora", SHORT, "--lora_dropout 0", f"--vllm_sync_lora {way}")
    assert in_command(words) == 0
    assert all(row["log_prob_gap"] < 1e-4 for row in rows(out)[1:])


def test_a_head_that_is_not_packed_again_stops_the_run_with_the_figure(
    tied_task, tmp_path, in_command, monkeypatch, capsys
):
    monkeypatch.setattr("trimtab.rollout.vllm.worker_extension.pack_heads", lambda model: None)
    assert in_command(arguments(tied_task, tmp_path / "out", "grpo", SHORT)) == 2
    assert "checks failed before the first step: engine: the engine samples from older" in capsys.readouterr().err
    assert in_command(arguments(tied_task, tmp_path / "out", "grpo", SHORT, "--skip_checks engine")) == 1
    told = capsys.readouterr().err
    assert "does not answer from the trainer's weights: after iteration 1" in told and "1.0e-03 is the limit" in told


def test_a_run_goes_on_from_its_checkpoint(tied_task, tmp_path, in_command):
    out = tmp_path / "out"
    words = arguments(tied_task, out, "grpo", SHORT)
    assert in_command(words) == 0
    further = [*words, "--load_checkpoint", "--max_steps", "3"]
    assert in_command(further) == 0
    assert rows(out)[-1]["step"] == 3 and rows(out)[-1]["log_prob_gap"] < 1e-4


def test_what_vllm_cannot_do_here_is_one_line(tied_task, tmp_path, in_command, capsys):
    for words, told in (
        ("--nproc 2", "add --ray"),
        ("--vllm_num_engines 1 --vllm_tensor_parallel_size 2", "add --ray"),
    ):
        assert in_command(arguments(tied_task, tmp_path / "out", "grpo", SHORT, words)) == 2
        assert told in capsys.readouterr().err


def test_generate_writes_answers_of_a_vllm_engine(tied_task, tmp_path, in_command):
    words = (
        f"generate --pretrain {tied_task}/model --dataset {tied_task}/prompts.jsonl --dataset_split train "
        f"--input_key input --apply_chat_template --best_of_n 2 --max_new_tokens 8 --rollout_engine vllm "
        f"--max_num_seqs 16 --output_path {tmp_path}/answers.jsonl"
    )
    assert in_command(words.split()) == 0
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 18
