import pytest

from trimtab.config.jobs import SFTOptions
from trimtab.errors import UserError
from trimtab.running.preparing import prepared


def test_options_that_were_made_in_python_are_settled_and_checked(capsys):
    options = prepared(SFTOptions(pretrain="owner/model", dataset="owner/data", input_template="Question"))
    assert options.input_template is None and options.ckpt_path == "./ckpt/checkpoints"
    assert capsys.readouterr().err.startswith("trimtab sft: warning: --input_template has no {}")
    with pytest.raises(UserError, match="--max_len is 0"):
        prepared(SFTOptions(pretrain="owner/model", dataset="owner/data", max_len=0))


def test_what_this_machine_lacks_is_said_in_a_dry_run_and_refused_else(monkeypatch, capsys):
    monkeypatch.setattr("trimtab.config.support.find_spec", lambda module: None)
    liger = {"pretrain": "owner/model", "dataset": "owner/data", "use_liger_kernel": True}
    prepared(SFTOptions(**liger, dry_run=True))
    assert "--use_liger_kernel needs the package" in capsys.readouterr().err
    with pytest.raises(UserError, match="--use_liger_kernel needs the package"):
        prepared(SFTOptions(**liger))
