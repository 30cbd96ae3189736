"""--routing_replay: updates with the experts of a recording. Those of vLLM's engine are in tests/vllm."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests import warm
from tests.train.job_run import assert_same_tensors, rows, weights
from tests.train.rl.rl_run import arguments, write_task
from tests.train.rl.test_recording import complaint
from trimtab.models.policy import Policy
from trimtab.models.routing import recorded_routes
from trimtab.models.selfcheck import choose_path
from trimtab.train.rl.experience import Experience
from trimtab.train.rl.micro_batches import make_slice

# One update, since the next would be of other weights, which may choose other experts.
ONE = "--max_steps 1 --max_epochs 1 --train_batch_size 16 --init_kl_coef 0.1"


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """A run of a mixture, with --record."""
    folder = write_task(tmp_path_factory.mktemp("task"), family="mixtral")
    assert warm.run(arguments(folder, folder / "out", "grpo", ONE, f"--record {folder}/recording")) == 0
    return folder


def read(path):
    """Tensors and description of an iteration."""
    with safe_open(path, "pt") as file:
        return load_file(path), file.metadata()


def add_routes(folder, to, turned):
    """The recording with the experts that the model chooses, or with the next one of each (`turned`)."""
    policy = Policy(AutoModelForCausalLM.from_pretrained(folder / "model"))
    choose_path(policy)
    (path,) = (folder / "recording").iterdir()
    tensors, described = read(path)
    experience, found = Experience.from_tensors(tensors), []
    for i in range(len(experience)):
        (batch,) = make_slice(experience, [[i]]).batches()
        with torch.no_grad(), recorded_routes(policy) as routes:
            policy(batch)
        found.append(torch.stack([chosen for (chosen,) in routes.values()], 1))
    tensors["routes_TLK"] = ((torch.cat(found) + turned) % 4).to(torch.uint8)
    to.mkdir()
    save_file(tensors, to / path.name, described)
    return to


def replayed(recording, out, *words):
    assert warm.run(arguments(recording, out, "grpo", ONE, *words)) == 0
    return rows(out), weights(out)


@pytest.mark.short(1)
@pytest.mark.parametrize("how", ["", "--gradient_checkpointing", "--use_dynamic_batch --train_max_tokens_per_gpu 64"])
def test_the_experts_that_the_model_chose_itself_change_no_bit_of_a_step(recording, tmp_path, how):
    routed = add_routes(recording, tmp_path / "routed", turned=0)
    plain = replayed(recording, tmp_path / "plain", f"--replay {recording}/recording", how)
    again = replayed(recording, tmp_path / "again", f"--replay {routed} --routing_replay on", how)
    assert plain[0] == again[0]
    assert_same_tensors(plain[1], again[1])


def test_recorded_experts_are_used_in_the_update_unless_they_are_switched_off(recording, tmp_path):
    routed = add_routes(recording, tmp_path / "routed", turned=1)
    plain = replayed(recording, tmp_path / "plain", f"--replay {recording}/recording")
    off = replayed(recording, tmp_path / "off", f"--replay {routed} --routing_replay off")
    assert_same_tensors(plain[1], off[1])
    on = replayed(recording, tmp_path / "on", f"--replay {routed}")
    before, after = plain[0][1], on[0][1]
    assert before["log_prob_gap"] < 1e-5 and after["log_prob_gap"] > 0.05
    # The experts' loads are those of the replayed ones; each layer's are turned by one, and so is the busiest.
    assert after["expert_max_load"] == before["expert_max_load"]
    assert on[1].keys() == plain[1].keys()


def test_what_cannot_be_replayed_is_one_line(recording, tmp_path):
    words = arguments(recording, tmp_path / "out", "grpo", ONE)
    assert "the built-in engine chooses experts as the trainer does" in complaint([*words, "--routing_replay", "on"])
    dense = write_task(tmp_path / "dense")
    replay = ["--replay", f"{recording}/recording", "--routing_replay", "on"]
    for more in ([], ["--dry_run"]):
        told = complaint([*arguments(dense, tmp_path / "out", "grpo", ONE), *replay, *more])
        assert "--routing_replay on: LlamaForCausalLM has no mixture of experts" in told
    assert "--exact on: leave one of them out" in complaint([*words, *replay, "--exact", "on"])
    assert "--compile on does not work with --routing_replay on" in complaint([*words, *replay, "--compile", "on"])
    routed = add_routes(recording, tmp_path / "routed", turned=0)
    (path,) = routed.iterdir()
    tensors, described = read(path)
    tensors["routes_TLK"] = tensors["routes_TLK"][:, :1].contiguous()
    save_file(tensors, path, described)
    told = complaint([*words, "--replay", str(routed), "--routing_replay", "on"])
    assert "the recorded experts are of another model: 1 layers with 2 experts a token" in told
