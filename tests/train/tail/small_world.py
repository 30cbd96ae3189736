"""A world of four tokens and answers of one or two of them, with real models: everything can be listed and summed.

The runs here are built and driven through the code that trains; what they are compared with is computed from Hugging
Face models and sums over all answers.
"""

import itertools
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.tiny import tiny_model
from tests.train.job_run import write_rows
from trimtab.config.parser import parse
from trimtab.config.resolved_config import check, settle
from trimtab.config.rl_jobs import TailOptions
from trimtab.distributed.device import find_device
from trimtab.distributed.launcher import RoleHost, launcher_of
from trimtab.distributed.process_group import World
from trimtab.interrupts import StopRequest
from trimtab.models.parallel.sharded_model import mesh_of
from trimtab.rewards.types import RewardRequest, RewardResult
from trimtab.rollout.trajectory import Trajectory
from trimtab.train.rl.experience import Experience
from trimtab.train.tail import proposal as builders
from trimtab.train.tail.tail_run import TailController, TailRun

WORDS = ["<pad>", "<eos>", "a", "b"]
END, LENGTH = 1, 2
PROMPT = [2, 3, 3]
ANSWERS = [(END,)] + [(x, y) for x in (0, 2, 3) for y in range(4)]


def make_tokenizer(words: list[str] = WORDS):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=words[0], eos_token=words[1], unk_token=words[0])


def reward_of(answer: tuple[int, ...]) -> float:
    """Some number in [-1.5, 1.5], another one for each answer."""
    return 1.5 * math.sin(1 + sum((1.7 * place + 1) * (token + 1) for place, token in enumerate(answer)))


class TableReward:
    name, concurrent = "table", False

    def __init__(self, reward=reward_of):
        self.reward = reward

    def __call__(self, request: RewardRequest) -> RewardResult:
        return RewardResult([self.reward(tuple(ids)) for ids in request.response_ids])

    def close(self) -> None:
        pass


def write_world(folder: Path, words: list[str] = WORDS, prompt: str = "a b b", **changes) -> Path:
    tokenizer = make_tokenizer(words)
    model = tiny_model("llama", vocab_size=len(words), eos_token_id=1, bos_token_id=None, **changes)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_rows(folder / "prompts.jsonl", [{"prompt": prompt}])
    return folder


def make_run(folder: Path, monkeypatch, *words: str, reward=reward_of, **changes) -> TailRun:
    """A run in this process, before its first step; `changes` go past the checks of the options."""
    monkeypatch.setattr(builders, "non_model_rewards", lambda *_: [(TableReward(reward), 1.0)])
    typed = (
        f"--pretrain {folder}/model --prompt_data {folder}/prompts.jsonl --input_key prompt "
        f"--reward_verifier length(0-2) --rollout_batch_size 1 --generate_max_len {LENGTH} "
        f"--save_path {folder}/out --ckpt_path {folder}/out/ckpt --init_kl_coef 0 --save_rollouts 0"
    )
    options, _ = settle(parse(TailOptions, [*typed.split(), *" ".join(words).split()]))
    check(options)
    for name, value in changes.items():
        object.__setattr__(options, name, value)
    device, world = find_device(), World()
    launcher = launcher_of(RoleHost(options, TailController.units(options, 1), mesh_of, device, world, StopRequest()))
    return TailController(options, device, world).run(launcher.groups(options))


def experience_of(
    answers: list[tuple[int, ...]], log_probs: list[list[float]] | None = None, *, group: int | None = None
) -> Experience:
    """These answers to the prompt as if they had been sampled, with these log-probs of their tokens (unset: 0), in
    groups of so many (unset: one of all)."""
    group = group or len(answers)
    log_probs = log_probs or [[0.0] * len(answer) for answer in answers]
    rollouts = [
        Trajectory(i // group, i % group, PROMPT, list(answer), np.array(values, dtype=np.float32), "stop")
        for i, (answer, values) in enumerate(zip(answers, log_probs))
    ]
    return Experience.of([0] * len(answers), rollouts, RewardResult([reward_of(answer) for answer in answers]))


def token_log_probs(model, answer: tuple[int, ...]) -> Tensor:
    """By Hugging Face's own forward pass."""
    logits = model(torch.tensor([PROMPT + list(answer)])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]


def all_log_probs(model) -> Tensor:
    """log p of every answer."""
    return torch.stack([token_log_probs(model, answer).sum() for answer in ANSWERS])


REWARDS = torch.tensor([reward_of(answer) for answer in ANSWERS])


def sigma(log_probs: Tensor, beta: float) -> Tensor:
    return (log_probs + beta * REWARDS).softmax(0).detach()


def gradients_of(value: Tensor, model) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters())
    return dict(zip(names, torch.autograd.grad(value, parameters)))


def caught_gradients(learner, monkeypatch) -> dict[str, Tensor]:
    """Filled with the gradients of the learner's next update, as they are before clipping."""
    found: dict[str, Tensor] = {}
    step = learner.optimizer.step

    def caught(number, **how):
        found.update({name: p.grad.clone() for name, p in learner.optimizer.working.items() if p.grad is not None})
        return step(number, **how)

    monkeypatch.setattr(learner.optimizer, "step", caught)
    return found


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    assert max(float(value.abs().max()) for value in expected.values()) > 0.01, "nothing to compare"
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=tolerance, rtol=1e-4)


def groups(size: int) -> list[tuple[tuple[int, ...], ...]]:
    return list(itertools.product(ANSWERS, repeat=size))
