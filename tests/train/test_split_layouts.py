"""However a model is split over processes, a run learns what it learns in one.

Of every layout and job: the gradients of the first step, ten steps of plain gradient descent, and ten of Adam. Descent
keeps a difference as large as it is, where Adam makes any of it a whole step of a weight whose gradient is near zero.
"""

from functools import cache, partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import warm
from tests.tiny import tiny_model
from tests.train.job_run import preference_rows, write_rows
from tests.train.rl.rl_run import REWARD
from trimtab.embedded.sort_task import make_prompts, make_rows, make_tokenizer
from trimtab.train.metrics import read_rows

STEPS = 10
FIRST, LAST, START = "first.safetensors", "last.safetensors", "start.safetensors"

LAYOUTS = {  # processes, and the flags that share them out
    "data 2": (2, "--zero_stage 3"),
    "tensor 2": (2, "--ds_tensor_parallel_size 2"),
    "context 2": (2, "--ring_attn_size 2 --zero_stage 3"),
    "zpg 2 of 4": (4, "--zero_stage 3 --zpg 2"),
    "shard_size 2 of 4": (4, "--zero_stage 3 --shard_size 2"),
    "tensor 2 x data 2": (4, "--ds_tensor_parallel_size 2 --zero_stage 3"),
    "context 2 x tensor 2": (4, "--ring_attn_size 2 --ds_tensor_parallel_size 2 --zero_stage 3"),
}
JOBS = {
    "sft": "sft --dataset {0}/rows.jsonl --max_len 40",
    "dpo": "dpo --dataset {0}/pairs.jsonl --beta 0.5 --max_len 40",
    "rm": "rm --dataset {0}/pairs.jsonl --max_len 40",
    "grpo": "grpo --prompt_data {0}/prompts.jsonl --label_key label --n_samples_per_prompt 4 --init_kl_coef 0.1 "
    f"{REWARD} --prompt_max_len 40 --generate_max_len 12 --rollout_batch_size 4 --max_epochs 2 --num_episodes 5",
}
MORE = {"packed": "--packing_samples --train_max_tokens_per_gpu 120", "lora": "--lora_rank 4"}
LINEAR = "--target_modules q_proj k_proj v_proj o_proj"  # not the experts
FAMILIES = ("llama", "qwen3", "mixtral")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    tokenizer = make_tokenizer()
    for family in FAMILIES:
        model = tiny_model(family, vocab_size=len(tokenizer), num_key_value_heads=2)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("mlp.gate.weight"):  # so that rounding chooses no other expert
                    parameter.mul_(5)
        model.save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
    write_rows(folder / "rows.jsonl", make_rows(16, 1))
    write_rows(folder / "pairs.jsonl", preference_rows(16))
    write_rows(folder / "prompts.jsonl", make_prompts(8, 1))
    return folder


def watched(place: Path, *, descent: bool) -> None:
    """Write down the gradients of the first step and the weights before and after; `descent`: in place of Adam."""
    from trimtab.distributed.fsdp import whole
    from trimtab.train.optimizer import Optimizer

    begin, plain = Optimizer.__init__, Optimizer.step

    def start(self, *given, **more):
        begin(self, *given, **more)
        if descent:
            self.adam = torch.optim.SGD(self._groups(0.0), lr=self.learning_rate)

    def step(self, number, **how):
        if number == 0:
            gradients = {name: self._gradient(name, master) for name, master in self.masters.items()}
            write(place / FIRST, {name: whole(found) for name, found in gradients.items() if found is not None})
            write(place / START, {name: whole(master.detach()) for name, master in self.masters.items()})
        report = plain(self, number, **how)
        write(place / LAST, {name: whole(master.detach()) for name, master in self.masters.items()})
        return report

    Optimizer.__init__, Optimizer.step = start, step


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    if path.parent.is_dir():
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)


def run(folder, place, job, family, words, *, processes=1, descent):
    """What it learnt, in `place`."""
    place.mkdir()
    rate = "actor_learning_rate" if job == "grpo" else "learning_rate"
    speed = 2e-3 if descent else 1e-3
    if (job, family) == ("grpo", "mixtral"):
        speed /= 20  # before a token is sent to another expert
    command = (
        f"{JOBS[job].format(folder)} --pretrain {folder}/{family} --apply_chat_template --train_batch_size 8 "
        f"--micro_train_batch_size 2 --{rate} {speed} --lr_warmup_ratio 0 --max_norm 0 "
        f"--max_steps {STEPS} --save_path {place}/out --ckpt_path {place}/out/ck {words}"
    )
    if job != "grpo":
        command += " --max_epochs 5"
    prepare = {rank: partial(watched, place if rank == 0 else place / "nowhere", descent=descent) for rank in range(4)}
    if processes == 1:
        warm.output(command.split(), prepare=prepare[0])
    else:
        warm.world_outputs(command.split(), processes, prepare=prepare)


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """One process's runs, made once; RL's rollouts are recorded."""

    @cache
    def make(job, family, words):
        place = tmp_path_factory.mktemp("alone")
        for descent in (True, False):
            record = f"--record {place}/recorded{descent}" if job == "grpo" else ""
            run(folder, place / str(descent), job, family, f"{words} {record}", descent=descent)
        return place

    return make


CASES = [
    ("tensor 2", "sft", "llama", "packed"),
    ("context 2", "dpo", "qwen3", "lora"),
    *((layout, job, "llama", "packed") for layout in LAYOUTS for job in ("sft", "dpo", "rm")),
    *((layout, "sft", family, more) for layout in LAYOUTS for family in ("qwen3", "mixtral") for more in MORE),
    *((layout, "grpo", family, "") for layout in LAYOUTS for family in FAMILIES),
    *((layout, job, "qwen3", "lora") for layout in LAYOUTS for job in ("dpo", "rm", "grpo")),
]


@pytest.mark.short(1)
@pytest.mark.parametrize(("layout", "job", "family", "more"), [*dict.fromkeys(CASES)])
def test_a_split_run_learns_what_one_process_learns(folder, alone, tmp_path, layout, job, family, more):
    processes, flags = LAYOUTS[layout]
    words = MORE.get(more, "")
    if (family, more) == ("mixtral", "lora"):
        words = f"{words} {LINEAR}"
    one = alone(job, family, words)
    for descent in (True, False):
        replay = f"--replay {one}/recorded{descent}" if job == "grpo" else ""
        place = tmp_path / str(descent)
        run(folder, place, job, family, f"{words} {flags} {replay}", processes=processes, descent=descent)
    same_gradients(one / "True", tmp_path / "True")
    assert way_apart(one / "True", tmp_path / "True") < 1e-3
    first, second = (losses(place / "False" / "out") for place in (one, tmp_path))
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5)


def test_adapters_of_experts_are_refused_over_several_processes(folder, tmp_path):
    command = f"{JOBS['sft'].format(folder)} --pretrain {folder}/mixtral --lora_rank 4 --save_path {tmp_path}/out"
    first, _ = warm.world_outputs(command.split(), 2, 2)
    assert first.splitlines()[-1].endswith("name the other layers: --target_modules k_proj o_proj q_proj v_proj")


def same_gradients(one: Path, other: Path) -> None:
    expected, found = load_file(one / FIRST), load_file(other / FIRST)
    assert expected.keys() == found.keys() and expected
    for name, gradient in expected.items():
        largest = max(float(gradient.abs().max()), 1e-6)
        assert float((found[name] - gradient).abs().max()) <= 1e-5 * largest + 1e-8, name


def way_apart(one: Path, other: Path) -> float:
    """How far the ends are from each other, in parts of the way that was gone."""
    start, expected, found = load_file(one / START), load_file(one / LAST), load_file(other / LAST)
    apart = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    gone = sum(float((expected[name] - start[name]).square().sum()) for name in expected)
    assert gone > 1e-6
    return (apart / gone) ** 0.5


def losses(out: Path) -> torch.Tensor:
    rows = read_rows(out / "metrics.jsonl")
    found = [row["loss"] if "loss" in row else row["policy_loss"] for row in rows]
    assert len(found) == STEPS
    return torch.tensor(found)
