import pytest

from trimtab.config.catalogue import options_of
from trimtab.config.help import help_text
from trimtab.config.jobs import SFTOptions
from trimtab.config.parse import parse


@pytest.mark.parametrize("width", [70, 80, 120])
def test_help_names_every_option_once_and_fits_the_terminal(width):
    lines = help_text(SFTOptions, width).splitlines()
    flags = [line.split()[0] for line in lines if line.startswith("  --")]
    assert sorted(flags) == sorted(f"--{name}" for name in options_of(SFTOptions))
    assert max(len(line) for line in lines if "usage" not in line) <= width


def test_help_shows_defaults_of_the_job_and_other_spellings():
    text = " ".join(help_text(SFTOptions, 120).split())
    assert "(default: ./ckpt/checkpoints_sft)" in text
    assert r"(default: 'User: {}\nAssistant: ')" in text
    assert "(default: 0.9 0.95)" in text
    assert "also --max_epoch;" in text


def test_each_heading_comes_once():
    headings = [line for line in help_text(SFTOptions).splitlines() if line.endswith(":") and line[0] != " "]
    assert "Optimiser:" in headings and len(headings) == len(set(headings)) == 11


@pytest.mark.parametrize("argv", [["-h"], ["--nonsense", "--help"]])
def test_asking_for_help_prints_it_and_leaves_with_zero(argv, capsys):
    with pytest.raises(SystemExit) as leaving:
        parse(SFTOptions, argv)
    assert leaving.value.code == 0
    assert capsys.readouterr().out.startswith("usage: trimtab sft")
