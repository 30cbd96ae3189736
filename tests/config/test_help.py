import re

import pytest

from tests.config.every_job import EVERY_JOB
from trimtab.config.jobs import KDOptions, LoraCombineOptions, SFTOptions
from trimtab.config.option import options_of
from trimtab.config.parser import COMMON, FEW, help_text, parse


@pytest.mark.parametrize("width", [70, 80, 120])
@pytest.mark.parametrize("job_class", EVERY_JOB)
def test_help_names_every_option_once_and_fits_the_terminal(job_class, width):
    lines = help_text(job_class, width, everything=True).splitlines()
    flags = [line.split()[0] for line in lines if line.startswith("  --")]
    assert sorted(flags) == sorted(f"--{name}" for name in options_of(job_class))
    assert max(len(line) for line in lines if "usage" not in line) <= width


def test_help_shows_defaults_of_the_job_and_other_spellings():
    text = " ".join(help_text(SFTOptions, 120, everything=True).split())
    assert "(default: trimtab_train_sft)" in text
    assert r"(default: 'User: {}\nAssistant: ')" in text
    assert "(default: 0.9 0.95)" in text
    assert re.search(r"also --max_epoch[;)]", text)


@pytest.mark.parametrize("job_class", EVERY_JOB)
def test_each_heading_comes_once(job_class):
    lines = help_text(job_class, everything=True).splitlines()
    headings = [line for line in lines if line.endswith(":") and line[0] != " "]
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


@pytest.mark.parametrize("job_class", EVERY_JOB)
def test_help_alone_shows_about_twenty_options_and_how_to_see_all(job_class, capsys):
    total = len(options_of(job_class))
    shown = sum(line.startswith("  --") for line in help_text(job_class, 120).splitlines())
    if total <= FEW:
        assert shown == total
    else:
        assert 20 <= shown - 1 <= 24 and f"Show all {total} options" in help_text(job_class, 120)
    with pytest.raises(SystemExit):
        parse(job_class, ["--help", "all"])
    assert sum(line.startswith("  --") for line in capsys.readouterr().out.splitlines()) == total


def test_every_option_that_people_use_is_an_option():
    known = {name for job_class in EVERY_JOB for name in options_of(job_class)}
    assert known >= COMMON
