"""A small RL run through the real command, and everything that two equal runs must agree on."""

import os
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.tiny import tiny_model
from tests.train.job_run import assert_same_tensors, rows, weights, write_model, write_rows
from trimtab.embedded.sort_task import make_prompts, make_tokenizer
from trimtab.train import checkpoint
from trimtab.train.metrics import read_rows
from trimtab.train.rl.loop import RLRun

PROMPTS, A_ROLLOUT, EPISODES = 9, 4, 2  # the last rollout has 2 prompts
ITERATIONS = 5

EVALUATION = ("--eval_dataset", "--eval_split", "--eval_steps", "--eval_n_samples_per_prompt")
# A random model's answers differ in whether they have an early digit: a reward that is neither constant nor rare.
REWARD = "--reward_verifier regex([0-4]):1.0,length(0-6):0.5"
ESTIMATORS = {
    "ppo": "ppo --n_samples_per_prompt 2 --lambd 0.9 --critic_learning_rate 1e-2 --kl_target 0.5 --kl_horizon 50",
    "reinforce": "reinforce --n_samples_per_prompt 2 --gamma 0.9 --entropy_loss_coef 0.01",
    "reinforce_baseline": "reinforce --advantage_estimator reinforce_baseline --n_samples_per_prompt 4",
    "rloo": "rloo --n_samples_per_prompt 4 --init_kl_coef 0",
    "grpo": "grpo --n_samples_per_prompt 4 --init_kl_coef 0.1",
    "dr_grpo": "grpo --advantage_estimator dr_grpo --n_samples_per_prompt 4 --init_kl_coef 0 --dual_clip 3",
    "filtered": "grpo --n_samples_per_prompt 4 --dynamic_filtering --dynamic_filtering_reward_range 0.5 1.0",
    "difficulty": "grpo --n_samples_per_prompt 4 --difficulty --difficulty_range 0.3 0.7 --difficulty_return 0.3 "
    "--policy_loss_type clip_cov --cov_ratio 0.1 --clip_cov_range 0.01 9 --entropy_target 2.5 --num_episodes 4",
    "muon": "grpo --n_samples_per_prompt 4 --init_kl_coef 0.1 --optimizer muon --enable_ema",
    "lora": "grpo --n_samples_per_prompt 4 --lora_rank 4 --lora_dropout 0.1 --init_kl_coef 0.1",
}


def write_task(folder: Path, **changes) -> Path:
    """Models and prompts."""
    write_model(folder / "model", **changes)
    write_rows(folder / "prompts.jsonl", make_prompts(PROMPTS, 1))
    write_rows(folder / "test.jsonl", make_prompts(5, 2))
    return folder


def write_judge(folder: Path, seed: int) -> None:
    """A reward model."""
    tokenizer = make_tokenizer()
    config = tiny_model(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, num_labels=1).config
    torch.manual_seed(seed)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def arguments(folder: Path, out: Path, estimator: str, *more: str) -> list[str]:
    verb, own = ESTIMATORS[estimator].split(maxsplit=1)
    fixed = (
        f"{verb} --pretrain {folder}/model --prompt_data {folder}/prompts.jsonl --label_key label "
        f"--apply_chat_template --eval_dataset {folder}/test.jsonl --eval_split train --eval_steps 2 "
        f"--eval_n_samples_per_prompt 2 {REWARD} --prompt_max_len 40 --generate_max_len 12 "
        f"--rollout_batch_size {A_ROLLOUT} --train_batch_size 8 --micro_train_batch_size 2 --max_epochs 2 "
        f"--num_episodes {EPISODES} --actor_learning_rate 3e-3 --lr_warmup_ratio 0 --save_steps 2 "
        f"--keep_dropout --save_path {out} --ckpt_path {out}/checkpoints"
    )
    return [*fixed.split(), *own.split(), *" ".join(more).split()]


def without(words: list[str], *flags: str) -> list[str]:
    """The words less these flags and the value of each."""
    gone = {place + i for place, word in enumerate(words) if word in flags for i in (0, 1)}
    return [word for place, word in enumerate(words) if place not in gone]


def result(out: Path) -> tuple:
    """Metrics, kept rollouts and their tokens, weights, and the last checkpoint's tensors."""
    last = max((out / "checkpoints").glob("global_step*"), key=lambda p: int(p.name.removeprefix("global_step")))
    tensors = {p.parent.name: load_file(p) for p in sorted(last.glob("*/tensors.safetensors"))}
    kept = [read_rows(out / f"{name}.jsonl") for name in ("rollouts", "tokens")]
    return rows(out), kept, {"model": weights(out)} | tensors


def assert_identical(first: tuple, second: tuple) -> None:
    assert first[0] == second[0]
    assert first[1] == second[1]
    assert first[2].keys() == second[2].keys()
    for part in first[2]:
        assert_same_tensors(first[2][part], second[2][part])


def at(moment: tuple[int, str, int], number: int, run_class: type = RLRun) -> None:
    """Send this process a signal in this iteration, after `done` calls of what it is doing."""
    iteration, what, done = moment
    calls = 0

    def flushed(path: Path) -> None:
        begun = [part.removeprefix(".writing-global_step") for part in path.parts if part.startswith(".writing-")]
        if begun and iteration <= int(begun[0]):
            os.kill(os.getpid(), number)
        flush(path)

    def interrupted(run, *given):
        nonlocal calls
        if run.counters.iteration == iteration:
            if calls == done:
                os.kill(os.getpid(), number)
            calls += 1
        return plain(run, *given)

    if what == "write":
        flush, checkpoint.flush = checkpoint.flush, flushed
    else:
        plain = getattr(run_class, what)
        setattr(run_class, what, interrupted)
