import pytest

from tests.config.every_job import EVERY_JOB
from trimtab.config.catalogue import options_of
from trimtab.config.help import help_text
from trimtab.config.jobs import KDOptions, LoraCombineOptions, SFTOptions
from trimtab.config.parse import parse


@pytest.mark.parametrize("width", [70, 80, 120])
@pytest.mark.parametrize("job_class", EVERY_JOB)
def test_help_names_every_option_once_and_fits_the_terminal(job_class, width):
    lines = help_text(job_class, width).splitlines()
    flags = [line.split()[0] for line in lines if line.startswith("  --")]
    assert sorted(flags) == sorted(f"--{name}" for name in options_of(job_class))
    assert max(len(line) for line in lines if "usage" not in line) <= width


def test_help_shows_defaults_of_the_job_and_other_spellings():
    text = " ".join(help_text(SFTOptions, 120).split())
    assert "(default: ./ckpt/checkpoints_sft)" in text
    assert r"(default: 'User: {}\nAssistant: ')" in text
    assert "(default: 0.9 0.95)" in text
    assert "also --max_epoch;" in text


@pytest.mark.parametrize("job_class", EVERY_JOB)
def test_each_heading_comes_once(job_class):
    headings = [line for line in help_text(job_class).splitlines() if line.endswith(":") and line[0] != " "]
    assert "Run:" in headings and len(headings) == len(set(headings))
    assert set(headings) == {f"{option.section}:" for option in options_of(job_class).values()}


def test_the_usage_line_shows_what_cannot_be_left_out():
    assert help_text(SFTOptions).startswith("usage: trimtab sft --pretrain MODEL --dataset DATA [option ...]\n")
    assert "--teacher_model MODEL [" in help_text(KDOptions).splitlines()[0]
    assert "--lora_path ADAPTER --output_path FOLDER [" in help_text(LoraCombineOptions).splitlines()[0]


@pytest.mark.parametrize("argv", [["-h"], ["--nonsense", "--help"]])
def test_asking_for_help_prints_it_and_leaves_with_zero(argv, capsys):
    with pytest.raises(SystemExit) as leaving:
        parse(SFTOptions, argv)
    assert leaving.value.code == 0
    assert capsys.readouterr().out.startswith("usage: trimtab sft")
