"""PaddleNLP's files as they are, on a tiny model: what a user of theirs types first."""

import shutil
from pathlib import Path

import pytest

from tests.json_server import answering
from tests.tiny import tiny_model
from tests.train.job_run import write_rows
from trimtab.cli.run_rl import main as run_rl
from trimtab.cli.train_grpo import main as grpo
from trimtab.cli.train_rl import main as rl
from trimtab.config.parser import parse
from trimtab.config.resolved_config import settle
from trimtab.config.rl_jobs import AnyRLOptions
from trimtab.embedded.sort_task import make_prompts, make_tokenizer
from trimtab.train.metrics import read_rows

FILES = Path(__file__).parents[2] / "examples" / "paddlenlp"
# What a tiny model on one CPU needs; all else is the file's.
SCALED = """--ds_tensor_parallel_size 1 --use_visualdl None --prompt_max_len 40 --generate_max_len 8
    --generate_min_len 2 --rollout_batch_size 2 --train_batch_size 16 --max_steps 2 --save_steps 1 --eval_steps 2
    --bf16 False --actor_learning_rate 1e-3"""


ASKED: list[dict] = []
"""What the server was asked."""


def scored(body: dict) -> dict:
    """PaddleNLP's protocol and no other."""
    ASKED.append(body)
    scores = [len(set(answer)) / 10 for answer in body["response"]]
    return {"error_code": 0, "error_msg": "Success", "score": scores}


@pytest.fixture(scope="module")
def server():
    with answering(scored) as url:
        yield url


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    tokenizer = make_tokenizer()
    changes = {"num_hidden_layers": 1, "max_position_embeddings": 40_960}
    tiny_model("llama", vocab_size=len(tokenizer), **changes).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    rows = [{"src": [row["input"][0]["content"]], "tgt": row["label"]} for row in make_prompts(64, 1)]
    # The files drop what does not fill an iteration, and the largest of theirs has 64 prompts.
    for name, kept in (("34567ppl/train", rows), ("5ppl/test", rows[:6])):
        (folder / "ppo-kk" / name).parent.mkdir(parents=True)
        write_rows(folder / "ppo-kk" / f"{name}.jsonl", kept)
    return folder


@pytest.fixture
def here(made, server, tmp_path, monkeypatch):
    """A folder with the data where the files look for it, and the words for what is elsewhere."""
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    ASKED.clear()
    return ["--pretrain", "policy", "--remote_rm_url", server]


@pytest.mark.short(1)
@pytest.mark.parametrize("name", ["grpo_argument", "reinforce_plus_plus_argument", "grpo_32b_argument"])
def test_a_file_passes_a_dry_run_which_prints_a_config_of_ours(here, tmp_path, capsys, name):
    words = ["--config", str(FILES / f"{name}.yaml"), *here, "--nproc", "4"]
    assert rl([*words, "--dry_run"]) == 0, capsys.readouterr().err
    told = capsys.readouterr()
    assert "trimtab rl: note: gradient accumulation" in told.err and "use_fused_rms_norm" in told.err
    assert ASKED
    (tmp_path / "resolved.yaml").write_text(told.out)
    again = parse(AnyRLOptions, ["--config", str(tmp_path / "resolved.yaml"), "--nproc", "4"])
    assert settle(again)[0] == settle(parse(AnyRLOptions, words))[0] and not again.notes


@pytest.mark.parametrize("name", ["grpo_argument", "reinforce_plus_plus_argument"])
def test_a_file_trains_a_tiny_model(here, capsys, name):
    assert run_rl([str(FILES / f"{name}.yaml"), *here, *SCALED.split(), "--save_path", "out"]) == 0, (
        capsys.readouterr().err
    )
    rows = [row for row in read_rows(Path("out/metrics.jsonl")) if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2] and all(row["skipped_steps"] == 0 for row in rows)
    asked = ASKED[-1]
    assert set(asked) == {"src", "tgt", "response"} and len(asked["src"]) == len(asked["response"])
    assert all(isinstance(text, str) for key in asked for text in asked[key])
    assert Path("out/model.safetensors").is_file()
    # ignore_save_lr_and_optim: checkpoints are models, and nothing else.
    saved = sorted(path.name for path in Path("out/checkpoints").iterdir())
    assert saved and all(list((Path("out/checkpoints") / name).glob("*.safetensors")) for name in saved)


@pytest.mark.long
def test_a_file_trains_in_the_layout_that_it_asks_for(here, capfd):
    """tensor_parallel_degree 2: two processes, each with half of every layer."""
    words = [str(FILES / "grpo_argument.yaml"), *here, *SCALED.split()[2:]]
    assert run_rl(words) == 2 and "start a multiple of 2 (--nproc 2)" in capfd.readouterr().err
    assert run_rl([*words, "--nproc", "2", "--save_path", "out"]) == 0
    assert capfd.readouterr().err.count("note: gradient accumulation 2: 2 prompts x 8") == 1
    assert [row["step"] for row in read_rows(Path("out/metrics.jsonl"))][-1] == 2


def test_a_file_learns_what_the_same_words_of_ours_do(here, capsys):
    ours = """--prompt_data ppo-kk/34567ppl/train.jsonl --input_key src --label_key tgt --no_shuffle --drop_last
        --temperature 0.7 --n_samples_per_prompt 8 --micro_train_batch_size 8 --lr_scheduler constant --l2 0.01
        --lr_warmup_ratio 0 --adam_betas 0.9 0.999 --num_episodes 2 --use_kl_loss --kl_estimator k3 --init_kl_coef 0.001
        --kl_clip 10 --entropy_loss_coef 0"""
    shared = [*here, *SCALED.split(), "--eval_dataset", "None"]
    assert run_rl([str(FILES / "grpo_argument.yaml"), *shared, "--save_path", "theirs"]) == 0, capsys.readouterr().err
    assert grpo([*ours.split(), *shared, "--save_path", "ours"]) == 0, capsys.readouterr().err
    names = ("reward", "length", "kl", "policy_loss", "kl_loss", "entropy", "loss", "learning_rate", "grad_norm")
    theirs, own = (
        [{name: row[name] for name in names} for row in read_rows(Path(run) / "metrics.jsonl")]
        for run in ("theirs", "ours")
    )
    assert theirs == own and len(own) == 2


def test_mistakes_are_one_line(here, tmp_path, capsys):
    text = (FILES / "grpo_argument.yaml").read_text()
    for wrong, told in (
        ("rollout_n: 8\nrolout: 1", "unknown key rolout"),
        ("rollout_n: 8\npipeline_parallel_degree: 1", "set twice"),
    ):
        (tmp_path / "wrong.yaml").write_text(text.replace("rollout_n: 8", wrong))
        assert run_rl([str(tmp_path / "wrong.yaml"), *here]) == 2
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1 and "wrong.yaml line " in error
