"""The same work described twice: an iteration of a run, and calls of a Learner on its answers."""

import pytest
import torch
from safetensors.torch import load_file

import trimtab
from tests.train.rl.rl_run import weights, write_task
from trimtab.api.learner import Learner
from trimtab.api.samples import Sample
from trimtab.cli.main import main
from trimtab.train.rl.experience import Experience

# Adam divides by the root of what it adds EPS to: with a large one a step is as smooth as its gradient.
RATE, EPS = 3e-3, 1e-2
SAME = f"""--prompt_max_len 40 --generate_max_len 8 --rollout_batch_size 4 --n_samples_per_prompt 4
    --train_batch_size 16 --micro_train_batch_size 4 --max_steps 1 --label_key label --apply_chat_template
    --actor_learning_rate {RATE} --lr_scheduler constant --adam_eps {EPS} --max_norm 0.3 --init_kl_coef 0
    --reward_verifier regex([0-4]):1.0,length(0-6):0.5"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def recorded(folder) -> tuple[list[Sample], list[float]]:
    """The answers that a run has learnt from, and their rewards."""
    experience = Experience.from_tensors(load_file(next(folder.glob("iteration*.safetensors"))))
    ids = experience.ids_T.split(experience.sequence_lengths_S.tolist())
    drawn = experience.drawn_T.split(experience.sequence_lengths_S.tolist())
    sampled = experience.sampled_N.split(experience.lengths_S.tolist())
    samples = [Sample(i.tolist(), d.numpy(), s.numpy()) for i, d, s in zip(ids, drawn, sampled)]
    return samples, experience.rewards_S.tolist()


@pytest.mark.parametrize(
    "flags, loss, config, per",
    [
        ("--eps_clip 0.3", "ppo", {"eps_clip": 0.3}, "tokens"),
        ("--policy_loss_type gspo", "gspo", {"token_reduction": "token_mean"}, "answers"),
    ],
)
def test_an_iteration_of_grpo_is_four_calls(folder, tmp_path, flags, loss, config, per):
    words = f"grpo --pretrain {folder}/model --prompt_data {folder}/prompts.jsonl --save_path {tmp_path}/run {SAME}"
    assert main([*words.split(), *flags.split(), "--record", f"{tmp_path}/recording"]) == 0
    one = Learner(folder / "model", bf16=False, learning_rate=RATE, adam_eps=EPS, max_norm=0.3)
    before = {name: tensor.clone() for name, tensor in one._policy.inner.state_dict().items()}
    samples, rewards = recorded(tmp_path / "recording")
    for sample, advantage in zip(samples, trimtab.advantages(rewards, group=4)):
        sample.advantages = advantage
    one.forward_backward(samples, loss, **config)
    one.optim_step(per=per)
    one.export(tmp_path / "model")
    ours, theirs = weights(tmp_path / "model"), weights(tmp_path / "run")
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6, msg=name)
    moved = max(float((ours[name] - before[name]).abs().max()) for name in ours)
    assert moved > 1e-3
