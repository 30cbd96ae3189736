"""Every command of the page for users of PaddleNLP runs: rows, reward and training, on a tiny model."""

import shutil
from pathlib import Path

import pytest
from datasets import Dataset

from tests.docs.pages import DOCS, commands
from tests.rewards.running import running
from trimtab.cli.main import main
from trimtab.cli.run_rl import main as run_rl
from trimtab.embedded import knights_task
from trimtab.rewards.verifiers import make_verifier
from trimtab.train.metrics import read_rows

# What a tiny model on one CPU needs.
SCALED = """--pretrain task/model --nproc 1 --ds_tensor_parallel_size 1 --zero_stage 0 --bf16 False --use_visualdl None
    --prompt_max_len 128 --generate_min_len 0 --generate_max_len 24 --rollout_slots 64 --max_steps 1 --eval_steps -1
    --eval_max_samples 2 --save_steps -1 --save_hf_ckpt False"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The repository's examples, the user's own file, and puzzles as the public sets have them."""
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(DOCS.parent / "examples")
    Path("grpo_argument.yaml").symlink_to("examples/paddlenlp/grpo_argument.yaml")
    knights_task.write("task", train=8, test=2)
    for split, place in (("train", "34567ppl"), ("test", "5ppl")):
        assert main(["kk-data", f"task/{split}.jsonl", f"ppo-kk/{place}/{split}.jsonl"]) == 0
        Dataset.from_json(f"task/{split}.jsonl").to_parquet(f"3ppl_{split}.parquet")
    return tmp_path


def test_every_command_of_the_page_runs(folder, capsys):
    trained = []
    with running(make_verifier("kk")) as server:
        for program, *words in commands("paddlenlp"):
            scaled = [*SCALED.split(), "--remote_rm_url", server.url]
            match program, words:
                case "torchrun", ["--nproc_per_node", _, "-m", "trimtab.cli.run_rl", *rest]:
                    code = run_rl([*rest, *scaled, "--dry_run"])
                case "trimtab", ["rl", *rest] if "--prompt_data" in rest:
                    shutil.rmtree("ppo-kk")  # from here on there is only what the page's own commands have made
                    code = main(["rl", *rest, *scaled, "--save_path", "out"])
                    trained.append(rest)
                case "trimtab", ["rl", *rest]:
                    code = main(["rl", *rest, *scaled, "--dry_run"])
                case "trimtab", ["serve-rm", *rest]:
                    code = main(["serve-rm", *rest, "--dry_run"])  # else it would serve for ever
                case "trimtab", ["kk-data", *_]:
                    code = main(words)
            assert code == 0, (program, words, capsys.readouterr().err)
    assert len(trained) == 1
    rows = read_rows(folder / "out" / "metrics.jsonl")
    assert rows[-1]["step"] == 1 and "eval_reward" in rows[-1]
