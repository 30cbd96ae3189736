"""The SFT commands that people have in their scripts: pasted, with names of things that exist here."""

import shlex
import sys

import pytest

from tests.cli.sft_job import conversation, write_model, write_rows
from trimtab.cli import train_sft
from trimtab.embedded.sort_task import make_rows, prompt_of, reference_of
from trimtab.train import metrics
from trimtab.train.metrics import GuardedLogger

KEY = "c0ffee" + "0123456789abcdef" * 2 + "42"
STEPS = 2

OFTEN = """--dataset rows.jsonl --input_key question --output_key response --train_batch_size 256 --max_samples 500000
    --pretrain model --save_path ./checkpoint/llama3-8b-sft --save_steps -1 --logging_steps 1 --eval_steps -1
    --zero_stage 2 --max_epochs 1 --bf16 --learning_rate 5e-6 --gradient_checkpointing"""
ASCEND = f"{OFTEN} --max_len 2048 --micro_train_batch_size 2 --load_checkpoint"
LOGGED = f"""{OFTEN} --input_template $'User: {{}}\\nAssistant: ' --flash_attn --packing_samples
    --use_wandb {{wandb_token}}"""
README = f"{LOGGED} --max_len 4096 --micro_train_batch_size 2"
CHINESE = f"{README} --load_checkpoint"
GUIDE = f"{LOGGED} --max_len 2048 --micro_train_batch_size 8"
COMMANDS = {"ascend": ASCEND, "chinese": CHINESE, "guide": GUIDE, "readme": README}


def words_of(text: str) -> list[str]:
    """As bash reads them, with the made-up key."""
    text = text.replace("{wandb_token}", KEY).replace("$'User: {}\\nAssistant: '", "'User: {}\nAssistant: '")
    return shlex.split(text)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """A model of few multiplications: the commands ask for bf16, which is slow on a CPU that does not know it."""
    changes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    return write_model(tmp_path_factory.mktemp("narrow") / "model", **changes)


@pytest.fixture(autouse=True)
def everything_in_one_folder(wandb_at_home, sft, tmp_path, narrow):
    """The model, and rows for two steps."""
    (tmp_path / "model").unlink()
    (tmp_path / "model").symlink_to(narrow)
    rows = [{"question": prompt_of(row), "response": reference_of(row)} for row in make_rows(STEPS * 256, seed=1)]
    write_rows(tmp_path / "rows.jsonl", rows)


def assert_key_is_nowhere(folder, output):
    assert KEY not in output.out + output.err
    for path in folder.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_documents_command_passes_a_dry_run_and_trains_two_steps(sft, tmp_path, name):
    words = words_of(COMMANDS[name])
    before = set(tmp_path.iterdir())
    rehearsed = sft(*words, "--dry_run")
    assert rehearsed.code == 0 and "parameters" in rehearsed.out, rehearsed.err
    assert set(tmp_path.iterdir()) == before
    ran = sft(*words)
    assert ran.code == 0, ran.err
    run = tmp_path / "checkpoint" / "llama3-8b-sft"
    rows = sft.rows(run)
    assert [row["step"] for row in rows] == [1, STEPS] and all(row["samples"] == 256 for row in rows)
    assert (run / "model.safetensors").exists()
    assert bool(list(run.glob("wandb/offline-run-*/*.wandb"))) == ("--use_wandb" in words)
    assert not (tmp_path / "wandb").exists()
    for output in (rehearsed, ran):
        assert_key_is_nowhere(tmp_path, output)


@pytest.mark.parametrize(
    "option, text, learnt",
    [
        ("--apply_chat_template", "<user>sort ", "<eos>"),
        ("--pretrain_mode", "sort ", "ort "),
        ("--multiturn --apply_chat_template", "<user>sort ", "<eos>"),
    ],
)
def test_the_options_in_their_comments(sft, tmp_path, option, text, learnt):
    words = [*words_of(README.replace("--use_wandb {wandb_token}", "")), *option.split()]
    assert sft(*words, "--dry_run").code == 0
    assert sft(*words).code == 0
    assert len(sft.rows(tmp_path / "checkpoint" / "llama3-8b-sft")) == STEPS
    assert len(sft.samples()) == 512
    assert all(whole.startswith(text) and learnt in trained for whole, trained in sft.samples())


def test_multiturn_conversations_by_the_documents_keys(sft, tmp_path):
    rows = [{"question": conversation("a", "b", "c", "d")["messages"]}] * 4
    write_rows(tmp_path / "rows.jsonl", rows)
    words = words_of(README.replace("--output_key response", "").replace("--use_wandb {wandb_token}", ""))
    assert sft(*words, "--multiturn", "--apply_chat_template").code == 0
    assert {trained for _, trained in sft.samples()} == {"b<eos>d<eos>"}


def test_ring_attention_is_for_several_processes(sft):
    words = [word for word in words_of(README) if word != "--flash_attn"]  # which a CPU warns of
    words += ["--ring_attn_size", "2", "--ring_head_stride", "2"]
    assert sft(*words, "--dry_run").code == 0
    assert sft(*words).mistake.startswith("--ring_attn_size 2: 1 process cannot be shared out so")


def test_the_module_started_by_itself_hides_the_key_from_what_loggers_copy(sft, tmp_path, monkeypatch, capsys):
    words = [*words_of(GUIDE), "--max_samples", "4"]
    monkeypatch.setattr(sys, "argv", ["train_sft.py", *words])
    assert train_sft.main() == 0
    assert_key_is_nowhere(tmp_path, capsys.readouterr())
    copied = list(tmp_path.rglob("wandb-metadata.json")) + list(tmp_path.rglob("*.wandb"))
    assert any(b"<redacted>" in path.read_bytes() for path in copied)


# ---- wandb and its troubles


def test_without_a_network_wandb_writes_for_later_and_says_so_once(sft, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    ran = sft(*words_of(GUIDE), "--max_samples", "4")
    assert ran.code == 0
    assert ran.out.count("wandb: http://127.0.0.1:9 cannot be reached; send the metrics later with: wandb sync") == 1
    assert "wandb" not in ran.err
    assert list((tmp_path / "checkpoint" / "llama3-8b-sft").glob("wandb/offline-run-*"))
    assert_key_is_nowhere(tmp_path, ran)


@pytest.mark.parametrize(
    "where", ["log", *(pytest.param(where, marks=pytest.mark.long) for where in ("init", "finish"))]
)
def test_a_logger_that_fails_is_left_out_and_training_goes_on(sft, tmp_path, monkeypatch, where):
    wandb = pytest.importorskip("wandb")

    def fail(*_, **__):
        raise RuntimeError(f"{where} went wrong\nbadly")

    monkeypatch.setattr(*((wandb, "init", fail) if where == "init" else (wandb.Run, where, fail)))
    ran = sft(*words_of(GUIDE), "--max_samples", "512")
    monkeypatch.undo()
    if wandb.run is not None:
        wandb.run.finish()
    assert ran.code == 0
    assert ran.out.count(f"warning: wandb is left out from here on: {where} went wrong badly") == 1
    assert len(sft.rows(tmp_path / "checkpoint" / "llama3-8b-sft")) == STEPS


def test_wandb_gets_the_curves_under_the_names_boards_group_by(sft, tmp_path, monkeypatch):
    class Recorder:
        rows: list = []  # noqa: RUF012

        def __init__(self, options, config, folder):
            assert config["steps"] == STEPS and folder.name == "llama3-8b-sft"

        def write(self, row):
            self.rows.append(metrics._curves(row))

        def close(self):
            pass

    monkeypatch.setattr(metrics, "WandbLog", Recorder)
    assert sft(*words_of(GUIDE), "--eval_dataset", "rows.jsonl").code == 0
    first, last = Recorder.rows
    assert "train/loss" in first and "train/learning_rate" in first and "eval/loss" not in first
    assert "eval/loss" in last and "train/eval_loss" not in last and "train/step" not in last


def test_a_steady_log_says_nothing_more_after_its_failure(capsys):
    class Broken:
        def write(self, row):
            raise ValueError("no")

    log = GuardedLogger("board", Broken)
    for _ in range(3):
        log.write({})
    log.close()
    assert capsys.readouterr().out == "warning: board is left out from here on: no\n"
