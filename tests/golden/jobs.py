"""The jobs of the golden runs: tiny commands and programs that use nothing but flags, public Python names and files.

Every job runs in a folder that holds its `files` only, such as `task.py` with the reward function below; `../../data`
holds the models and rows of `trimtab.embedded.tiny_recipes`. BASE begins a job that has a `stop`, the signal ends it
there, and the working tree resumes it; its result must equal BASE's uninterrupted run.
"""

import re
from dataclasses import dataclass

DATA = "../../data"
OUT = "--save_path out --ckpt_path out/checkpoints"

# User code that can end the run it belongs to: GOLDEN_STOP="SIGTERM call 3" sends that signal at its third call.
TASK = """
import os
import signal


def count_call():
    name, kind, number = os.environ.get("GOLDEN_STOP", "none none 0").split()
    if kind != "call":
        return
    with open("calls", "a") as calls:
        calls.write(".")
    if os.path.getsize("calls") == int(number):
        os.kill(int(os.environ["GOLDEN_PID"]), getattr(signal, name))


def reward(prompts, completions, **columns):
    count_call()
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(sum(map(ord, text)) % 5) / 4 for text in texts]


"""

SUPERVISED = f"--pretrain {DATA}/llama --max_len 64 --train_batch_size 8 --micro_train_batch_size 2 --max_samples 32"
SUPERVISED += f" --learning_rate 1e-3 --save_steps 2 {OUT}"
QUESTIONS = f"--dataset {DATA}/questions.jsonl --input_key question --output_key response"
PAIRS = f"--dataset {DATA}/preferences.jsonl --apply_chat_template"
PROMPTS = f"--prompt_data {DATA}/prompts.jsonl --input_key problem --label_key answer --prompt_max_len 40"
SAMPLING = "--generate_max_len 8 --rollout_batch_size 4 --n_samples_per_prompt 4 --train_batch_size 8"
UPDATES = "--micro_train_batch_size 4 --actor_learning_rate 1e-3 --save_steps 1 --lr_warmup_ratio 0"
RL = f"--pretrain {DATA}/llama {PROMPTS} {SAMPLING} {UPDATES} --max_samples 16"
REWARD = "--reward_func task.py:reward"
ASYNC = f"grpo {RL} --init_kl_coef 0 --async_train --rollout_slots 6"
GENERATE = f"generate --pretrain {DATA}/llama --dataset {DATA}/prompts.jsonl --input_key problem --max_samples 24"
GENERATE += " --max_new_tokens 8 --temperature 1 --best_of_n 2 --micro_batch_size 4 --output_path out.jsonl"

LEARNER = f'''
import os

import trimtab


def learn(learner, steps):
    for _ in range(steps):
        samples = learner.sample(["sort 312>", "sort 4421>"], n=4, max_new_tokens=6)
        rewards = [sum(map(ord, sample.text)) % 5 / 4 for sample in samples]
        for sample, advantage in zip(samples, trimtab.advantages(rewards, group=4)):
            sample.advantages = advantage
        learner.forward_backward(samples, "ppo")
        learner.optim_step()


if os.path.exists("saved"):
    learner = trimtab.Learner.load("saved")
else:
    learner = trimtab.Learner("{DATA}/llama", bf16=False, learning_rate=1e-3)
    learn(learner, 2)
    learner.save("saved")
if not os.environ.get("GOLDEN_STOP"):
    learn(learner, 2)
    learner.export("out")
'''


@dataclass(frozen=True)
class Job:
    name: str
    commands: tuple[str, ...] = ()  # arguments of trimtab, run in this order
    program: str = ""  # or a Python program
    files: tuple[tuple[str, str], ...] = (("task.py", TASK),)  # name and text
    uses: str = ""  # name of a job, of whose run with BASE this one gets the folder `recorded`
    stop: str = ""  # "SIGNAL call N" or "SIGNAL rows N": BASE is ended there, and the working tree resumes
    leaves: str = ""  # pattern of a file that the interrupted run must have left, else nothing is tested
    resume: str = " --load_checkpoint"
    by_ledger: int = 0  # staleness bound: batches depend on timing, so every group is trained once, and in time

    @property
    def folder(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower())


def command(name: str, words: str, **more) -> Job:
    return Job(name, (words,), **more)


GRPO = f"grpo {RL} {OUT} {REWARD} --init_kl_coef 0.1"
SFT = f"sft {SUPERVISED} {QUESTIONS}"
STEPS = f"--dataset {DATA}/judged_steps.jsonl --label_key value --placeholder_token ки --reward_tokens + -"
JUDGED = f"--dataset {DATA}/judged_answers.jsonl --input_key instruction --output_key response --label_key score"

JOBS = [
    command("sft, packed", f"{SFT} --packing_samples"),
    command("sft, padded", f"{SFT} --attn_implementation eager"),
    command("sft, LoRA, mixture of experts", f"{SFT} --lora_rank 4".replace("/llama", "/mixtral")),
    command("sft, 2 processes, ZeRO 3", f"{SFT} --nproc 2 --zero_stage 3"),
    command("rm", f"rm {SUPERVISED} {PAIRS}"),
    command("prm", f"prm {SUPERVISED} {STEPS}"),
    command("dpo", f"dpo {SUPERVISED} {PAIRS}"),
    command("kto", f"kto {SUPERVISED} {JUDGED}"),
    command("kd", f"kd {SUPERVISED} {QUESTIONS} --teacher_model {DATA}/teacher"),
    command("ppo, reward model", f"ppo {RL} {OUT} --reward_pretrain {DATA}/reward --critic_learning_rate 1e-3"),
    command("grpo", GRPO),
    command("grpo, LoRA", f"{GRPO} --lora_rank 4"),
    command("grpo, 2 processes, ZeRO 3", f"{GRPO} --nproc 2 --zero_stage 3"),
    command("dapo", f"dapo {RL} {OUT} --reward_verifier regex([0-4]):1.0"),
    command("reinforce", f"reinforce {RL} {OUT} {REWARD}"),
    command("rloo", f"rloo {RL} {OUT} {REWARD}"),
    command("async, staleness 0", f"{ASYNC} {OUT} {REWARD} --async_staleness 0"),
    command("async, staleness 1", f"{ASYNC} {OUT} {REWARD} --async_staleness 1 --record recorded", by_ledger=1),
    command("replayed", f"grpo {RL} {OUT} --init_kl_coef 0 --replay recorded", uses="async, staleness 1"),
    command("generate", f"{GENERATE} {REWARD}"),
    Job("Learner", program=LEARNER),
    command("resumed sft", SFT, stop="SIGTERM rows 2"),
    command("resumed grpo, killed", GRPO, stop="SIGKILL call 3"),
    command(
        "resumed async, unfinished groups",
        f"{ASYNC} {OUT} {REWARD} --async_staleness 2",
        stop="SIGTERM call 7",
        leaves="out/checkpoints/*/ahead/*",
        by_ledger=2,
    ),
    Job("resumed Learner", program=LEARNER, stop="none none 0", leaves="saved/*"),
]
