"""The jobs of the golden runs: tiny commands and programs that use nothing but flags, public Python names and files.

Every job runs in a folder that holds its `files` only, such as `task.py` with a reward function; `../../data` holds the
models and rows of `trimtab.embedded.tiny_recipes`, `../../game` those of `trimtab.embedded.guess_game`. BASE begins a
job that has a `stop`, the signal ends it there, and the working tree resumes it; its result must equal BASE's
uninterrupted run.
"""

import re
from dataclasses import dataclass

DATA = "../../data"
OUT = "--save_path out --ckpt_path out/checkpoints"

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

PLAY = f"grpo --pretrain ../../game/model --prompt_data ../../game/prompts.jsonl --label_key label {SAMPLING} {UPDATES}"
PLAY += f" --generate_max_len 3 --max_samples 12 --init_kl_coef 0 --env_workers 1 {OUT}"


@dataclass(frozen=True)
class Job:
    name: str
    commands: tuple[str, ...] = ()  # arguments of trimtab, run in this order
    program: str = ""  # or a Python program, of those in programs/
    files: tuple[str, ...] = ("task.py",)  # of those in programs/, for the job's folder
    uses: str = ""  # name of a job, of whose run with BASE this one gets the folder `recorded`
    stop: str = ""  # "SIGNAL call N", or rows N, or backward N: BASE is ended there, and the working tree resumes
    leaves: str = ""  # pattern of a file that the interrupted run must have left, else nothing is tested
    resume: str = " --load_checkpoint"
    by_ledger: int = 0  # staleness bound: batches depend on timing, so every group is trained once, and in time
    plays: bool = False  # episodes: figures of the log-probs that the engine drew with are not compared

    @property
    def folder(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower())


def command(name: str, words: str, **more) -> Job:
    return Job(name, (words,), **more)


GRPO = f"grpo {RL} {OUT} {REWARD} --init_kl_coef 0.1"
SFT = f"sft {SUPERVISED} {QUESTIONS}"
STEPS = f"--dataset {DATA}/judged_steps.jsonl --label_key value --placeholder_token ки --reward_tokens + -"
JUDGED = f"--dataset {DATA}/judged_answers.jsonl --input_key instruction --output_key response --label_key score"
INSIDE = {"stop": "SIGTERM backward 8", "leaves": "out/checkpoints/*/experience/*"}
TAIL = "tail --method repulse --proposal_learning_rate 1e-3 --alpha 0.5 --target_dist_beta -1 --bad_threshold 0.5"
TAILED = f"{TAIL} {RL} {OUT} {REWARD} --train_batch_size 16"
GENERATE_EPISODES = "generate --pretrain ../../game/model --environment trimtab:guess --env_rows 8 --env_workers 1"
GENERATE_EPISODES += " --max_new_tokens 3 --output_path out.jsonl"
GAME = f"{PLAY} --agent_func_path game.py:Game"
GAME_FILES = ("task.py", "game.py")

JOBS = [
    Job("options", program="options.py"),
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
    command("rl", f"rl {RL} {OUT} {REWARD} --advantage_estimator reinforce_baseline --init_kl_coef 0.1"),
    command("tail", TAILED),
    command("grpo, environment from a file", GAME, files=GAME_FILES, plays=True),
    command("grpo, agent at an endpoint", f"{PLAY} --agent_func_path agent.py:run", files=("agent.py",), plays=True),
    Job("grpo, class given in Python", program="given.py", plays=True),
    Job("grpo, tools given in Python", program="tools.py", plays=True),
    command("async, staleness 0", f"{ASYNC} {OUT} {REWARD} --async_staleness 0"),
    command("async, staleness 1", f"{ASYNC} {OUT} {REWARD} --async_staleness 1 --record recorded", by_ledger=1),
    command("replayed", f"grpo {RL} {OUT} --init_kl_coef 0 --replay recorded", uses="async, staleness 1"),
    command("generate", f"{GENERATE} {REWARD}"),
    command("generate, environment", f"{GENERATE_EPISODES} --best_of_n 2"),
    Job("servers", program="served.py"),
    Job("Learner, episodes", program="player.py"),
    Job("Learner", program="learner.py"),
    command("resumed sft", SFT, stop="SIGTERM rows 2"),
    command("resumed grpo, killed", GRPO, stop="SIGKILL call 3"),
    command(
        "resumed async, unfinished groups",
        f"{ASYNC} {OUT} {REWARD} --async_staleness 2",
        stop="SIGTERM call 7",
        leaves="out/checkpoints/*/ahead/*",
        by_ledger=2,
    ),
    command("resumed grpo, inside an iteration", GRPO, **INSIDE),
    command("resumed tail", TAILED, **INSIDE | {"stop": "SIGTERM backward 6"}),
    command("resumed grpo, environment from a file", GAME, files=GAME_FILES, plays=True, stop="SIGTERM call 50"),
    command(
        "resumed async, unfinished episodes",
        f"{GAME} --async_train --async_staleness 2",
        files=GAME_FILES,
        plays=True,
        stop="SIGTERM call 50",
        leaves="out/checkpoints/*/ahead/*",
        by_ledger=2,
    ),
    Job("resumed grpo, class given in Python", program="given.py", plays=True, **INSIDE),
    Job("resumed grpo, tools given in Python", program="tools.py", plays=True, **INSIDE),
    command(
        "resumed generate",
        f"{GENERATE} {REWARD} --max_samples 64 --best_of_n 4",
        stop="SIGKILL call 3",
        leaves="out.jsonl.partial/*",
        resume="",
    ),
    Job("resumed Learner", program="learner.py", stop="none none 0", leaves="saved/*"),
]
