"""One tiny run of every verb, on the real path: what `make test-quick` knows of commands."""

import io
import shlex

import pytest

from tests.cli.conftest import STEP_END, write_rows
from tests.hub_standin import hub_standin
from trimtab.cli.main import VERBS, main
from trimtab.config.jobs import TRAINED
from trimtab.embedded.knights_task import make_puzzles
from trimtab.embedded.sort_task import make_prompts

SUPERVISED = "--pretrain model --max_len 64 --train_batch_size 4 --micro_train_batch_size 4 --max_samples 4"
RL = (
    "--pretrain model --prompt_data prompts.jsonl --label_key label --apply_chat_template --prompt_max_len 40 "
    "--generate_max_len 4 --rollout_batch_size 2 --n_samples_per_prompt 2 --train_batch_size 4 "
    "--micro_train_batch_size 4 --max_samples 2 --reward_verifier regex([0-4]):1.0"
)
OUT = "--save_path out --ckpt_path ck"

# The commands of a verb, the last of them its own, and what it leaves.
RUNS = {
    "quickstart": (["quickstart --folder out --steps 1 --iterations 1"], "out/grpo/report.html"),
    "sft": ([f"sft {SUPERVISED} --dataset train.jsonl {OUT}"], "out/model.safetensors"),
    "rm": ([f"rm {SUPERVISED} --dataset pairs.jsonl {OUT}"], "out/model.safetensors"),
    "prm": (
        [f"prm {SUPERVISED} --dataset steps.jsonl --placeholder_token {STEP_END} --reward_tokens + - {OUT}"],
        "out/model.safetensors",
    ),
    "dpo": ([f"dpo {SUPERVISED} --dataset pairs.jsonl {OUT}"], "out/model.safetensors"),
    "kto": ([f"kto {SUPERVISED} --dataset judged.jsonl {OUT}"], "out/model.safetensors"),
    "kd": ([f"kd {SUPERVISED} --dataset train.jsonl --teacher_model other {OUT}"], "out/model.safetensors"),
    **{verb: ([f"{verb} {RL} {OUT}"], "out/model.safetensors") for verb in ("ppo", "grpo", "reinforce", "rloo", "rl")},
    "dapo": ([f"dapo {RL} {OUT}"], "out/model.safetensors"),
    "tail": (
        [f"tail {RL} --method repulse --proposal_learning_rate 1e-3 --alpha 0.5 --target_dist_beta -1 {OUT}"],
        "out/model.safetensors",
    ),
    "generate": (
        ["generate --pretrain model --dataset prompts.jsonl --output_path out.jsonl --max_new_tokens 2"],
        "out.jsonl",
    ),
    "chat": (["chat --pretrain model --max_len 60"], None),
    "play": (["play trimtab:guess --max_turns 1"], None),
    "lora-combine": (
        [
            f"sft {SUPERVISED} --dataset train.jsonl --lora_rank 2 {OUT}",
            "lora-combine --model_path model --lora_path out --output_path whole",
        ],
        "whole/model.safetensors",
    ),
    "attack": (
        [
            "attack --pretrain model --atk_success_criteria target --file_path goals.csv --gcg_steps 1 "
            "--gcg_search_width 4 --gcg_topk 4 "
            "--samples_per_prompt 2 --max_new_tokens 2 --output_path out.jsonl"
        ],
        "out.jsonl",
    ),
    "kk-data": (["kk-data puzzles.jsonl out.jsonl"], "out.jsonl"),
    "check": ([f"check sft {SUPERVISED} --dataset train.jsonl {OUT}"], None),
    "plan": (["plan sft --pretrain model --on H200"], None),
    "jobs": (["jobs --seeds 1 --shell --output out -- trimtab sft --pretrain model"], "out/start_all.sh"),
    "report": ([f"sft {SUPERVISED} --dataset train.jsonl {OUT}", "report out --output page.html"], "page.html"),
}

ELSEWHERE = {
    "tour": "made of the others; tests/embedded/test_tour.py",
    "serve": "does not end by itself; tests/cli/test_serve.py",
    "serve-rm": "does not end by itself; tests/cli/test_serve_rm.py",
    "compare": "needs a run of several steps twice; tests/cli/test_compare.py",
    "push": "needs a hub; tests/cli/test_push.py",
    "watch": "looks at files alone; tests/cli/test_watch.py",
    "plot": "reads the files of many runs; tests/report/test_plots.py",
}


def test_every_verb_is_here_or_elsewhere():
    assert RUNS.keys() | ELSEWHERE.keys() == VERBS.keys() and not RUNS.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize("verb", RUNS)
def test_it_runs_and_leaves_what_it_should(verb, place, monkeypatch, capsys):
    write_rows(place / "prompts.jsonl", make_prompts(4, 1))
    write_rows(place / "puzzles.jsonl", make_puzzles(2, 1))
    (place / "goals.csv").write_text("goal,target\nHow are you,Sure\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("exit\n"))
    commands, left = RUNS[verb]
    assert commands[-1].startswith(verb)
    with hub_standin(monkeypatch) as hub:
        for command in commands:
            assert left is None or not (place / left).exists(), "an earlier command has left it"
            words = shlex.split(command) + (["--push_to_hub", "me/trained"] if verb in TRAINED else [])
            assert main(words) == 0, capsys.readouterr().err
    assert left is None or (place / left).stat().st_size > 0
    if verb in TRAINED:
        assert hub.files["me/trained"]["model.safetensors"] == (place / left).read_bytes()
        assert f"- {verb}\n" in hub.files["me/trained"]["README.md"].decode()
