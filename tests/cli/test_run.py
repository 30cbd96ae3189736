import contextlib
import re
import signal
import sys

import pytest

from trimtab.api.run import call_errors
from trimtab.cli.main import guarded, run_job
from trimtab.config import resolved_config as support
from trimtab.config.jobs import SFTOptions
from trimtab.config.parser import parse
from trimtab.data.data_files import first_line
from trimtab.errors import Interrupted, RunFailed, UserError
from trimtab.rewards.client import failure_text as reward_failure

KEY = "0123456789abcdef0123456789abcdef01234567"
GOOD = ["--pretrain", "owner/model", "--dataset", "owner/data"]


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ("WORLD_SIZE", "HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def never(options):
    raise AssertionError("must not be reached")


def failing_with(error):
    def start(options):
        raise error

    return start


def test_a_run_gets_its_options_and_succeeds(capsys):
    seen = []
    assert run_job(SFTOptions, [*GOOD, "--max_len", "9"], seen.append, never) == 0
    assert seen[0].max_len == 9 and seen[0].wandb_run_name
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "argv, expected",
    [
        ([*GOOD, "--learning_rat", "1"], "unknown option --learning_rat; did you mean --learning_rate?"),
        ([*GOOD, "--max_len", "x"], "--max_len: takes a whole number, not 'x'"),
        (["--dataset", "owner/data"], "--pretrain is missing: give a hub name or a model folder"),
        ([*GOOD, "--zpg", "8"], "--zpg keeps split what --zero_stage 2 does not split: use --zero_stage 3"),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry_run"]])
def test_a_mistake_is_one_line_and_exit_code_2_before_anything_starts(argv, expected, dry, capsys):
    assert run_job(SFTOptions, argv + dry, never, never) == 2
    output = capsys.readouterr()
    assert output.err == f"trimtab sft: error: {expected}\n" and output.out == ""


def test_help_succeeds(capsys):
    assert run_job(SFTOptions, ["--help"], never) == 0
    assert capsys.readouterr().out.startswith("usage: trimtab sft")


def test_a_dry_run_rehearses_and_prints_a_config_that_reads_back(tmp_path, capsys):
    lines = ["3 rows", "2 steps"]
    assert run_job(SFTOptions, [*GOOD, "--bf16", "--dry_run"], never, lambda options: lines) == 0
    written = capsys.readouterr().out
    assert written.endswith("# 3 rows\n# 2 steps\n")
    (tmp_path / "c.yaml").write_text(written)
    again = parse(SFTOptions, ["--config", str(tmp_path / "c.yaml")])
    assert (again.bf16, again.pretrain, again.dry_run) == (True, "owner/model", False)


def test_a_mistake_found_in_rehearsal_is_one_line(capsys):
    assert run_job(SFTOptions, [*GOOD, "--dry_run"], never, failing_with(UserError("rows.jsonl line 3:\nbroken"))) == 2
    assert capsys.readouterr().err == "trimtab sft: error: rows.jsonl line 3: broken\n"


def test_missing_hardware_is_a_warning_in_a_dry_run_and_an_error_at_start(monkeypatch, capsys):
    monkeypatch.setattr(support, "find_spec", lambda module: None)
    argv = [*GOOD, "--use_liger_kernel"]
    assert run_job(SFTOptions, [*argv, "--dry_run"], never, lambda options: []) == 0
    assert "trimtab sft: warning: --use_liger_kernel needs" in capsys.readouterr().err
    assert run_job(SFTOptions, argv, never) == 2
    assert "trimtab sft: error: --use_liger_kernel needs" in capsys.readouterr().err


def test_warnings_are_said_and_the_run_goes_on_with_the_settled_options(capsys):
    seen = []
    assert run_job(SFTOptions, [*GOOD, "--input_template", "Question"], seen.append) == 0
    assert seen[0].input_template is None
    assert capsys.readouterr().err.count("warning:") == 1


@pytest.mark.parametrize(
    "error, code, line",
    [
        (Interrupted(15, "stopped at step 7; add --load_checkpoint"), 143, "stopped at step 7; add --load_checkpoint"),
        (RunFailed("loss is not finite"), 1, "failed: loss is not finite"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_run_that_ends_early_says_why_in_one_line_and_has_its_exit_code(error, code, line, capsys):
    assert run_job(SFTOptions, GOOD, failing_with(error)) == code
    assert capsys.readouterr().err == f"trimtab sft: {line}\n"


def test_a_defect_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_job(SFTOptions, GOOD, failing_with(ZeroDivisionError()))


@pytest.mark.parametrize(
    "error", [UserError(f"bad key {KEY}"), Interrupted(2, f"with {KEY}"), RuntimeError(f"refused {KEY}")]
)
def test_a_key_is_in_nothing_that_is_printed(error, monkeypatch, capsys):
    monkeypatch.setattr(support, "find_spec", lambda module: object())
    argv = [*GOOD, "--use_wandb", KEY]
    assert run_job(SFTOptions, argv, failing_with(error)) != 0
    assert run_job(SFTOptions, [*argv, "--dry_run"], never, lambda options: [f"key {options.use_wandb}"]) == 0
    output = capsys.readouterr()
    assert "<redacted>" in output.err and "<redacted>" in output.out
    assert KEY not in output.err + output.out


def test_a_key_leaves_the_command_line_that_loggers_copy(monkeypatch):
    monkeypatch.setattr(support, "find_spec", lambda module: object())
    monkeypatch.setattr(sys, "argv", ["trimtab", *GOOD, f"--use_wandb={KEY}"])
    seen = []
    assert run_job(SFTOptions, None, seen.append) == 0
    assert seen[0].use_wandb == KEY
    assert sys.argv[-1] == "--use_wandb=<redacted>"


ADVICE = "You can disable extension auto-loading with TORCH_DEVICE_BACKEND_AUTOLOAD=0."


@pytest.mark.parametrize(
    "error, cause, told",
    [
        (
            ModuleNotFoundError("Could not import module 'LlamaConfig'"),
            RuntimeError("operator torchvision::nms does not exist"),
            "trimtab sft: error: .*pip uninstall torchvision torchaudio torchcodec.*",
        ),
        (  # where a package of another device is installed without its driver
            RuntimeError(f"Failed to load the backend extension: torch_npu. {ADVICE}"),
            ImportError("libascend_hal.so: cannot open shared object file\nand a trace"),
            "trimtab sft: error: Failed to load the backend extension: torch_npu.*AUTOLOAD=0.*"
            "The reason: libascend_hal.so: cannot open shared object file",
        ),
    ],
)
def test_what_torch_cannot_import_is_told_in_a_line_with_its_cure(capsys, error, cause, told):
    def importing():
        raise error from cause

    assert guarded("trimtab sft", importing) == 2
    assert re.fullmatch(f"{told}\n", capsys.readouterr().err)


@contextlib.contextmanager
def ended_after(seconds):
    def end(*_):
        pytest.fail(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_errors_that_are_each_other_s_causes_are_told_and_not_followed_for_ever(capsys, length):
    errors = [RunFailed(f"number {number}") for number in range(length)]
    for error, cause in zip(errors, errors[1:] + errors[:1]):
        error.__cause__ = cause
    with ended_after(10):
        assert run_job(SFTOptions, GOOD, failing_with(errors[0])) == 1
        assert first_line(errors[0]) == f"number {length - 1}"
        assert reward_failure(errors[0]) == "number 0"
        with pytest.raises(RunFailed), call_errors(SFTOptions, {}):
            raise errors[0]
    assert capsys.readouterr().err == "trimtab sft: failed: number 0\n"
