import pytest

from trimtab.config import support
from trimtab.config.jobs import SFTOptions
from trimtab.errors import UserError


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch):
    monkeypatch.setattr(support, "find_spec", lambda module: None)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    "name, value",
    [
        ("deepcompile", True),
        ("zpg", 8),
        ("ds_tensor_parallel_size", 2),
        ("ring_attn_size", 2),
        ("ring_head_stride", 2),
        ("use_ds_universal_ckpt", True),
        ("use_ms", True),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(name, value):
    with pytest.raises(UserError, match=f"^--{name} "):
        support.refuse_unimplemented(SFTOptions(**{name: value}))


def test_what_one_process_can_do_is_accepted():
    options = SFTOptions(
        zero_stage=3, overlap_comm=True, local_rank=0, adam_offload=True, grad_accum_dtype="bf16", disable_ds_ckpt=True
    )
    support.refuse_unimplemented(options)
    assert support.hardware_problems(options) == []


def test_flash_attn_never_needs_a_package():
    assert support.hardware_problems(SFTOptions(flash_attn=True)) == []


@pytest.mark.parametrize(
    "changes, package",
    [
        ({"use_wandb": "True"}, "wandb"),
        ({"use_visualdl": "board"}, "visualdl"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"use_liger_kernel": True}, "liger_kernel"),
        ({"attn_implementation": "flash_attention_2"}, "flash_attn"),
    ],
)
def test_a_missing_package_is_a_problem_only_where_it_is_missing(changes, package, monkeypatch):
    (problem,) = support.hardware_problems(SFTOptions(**changes))
    assert f"needs the package {package}" in problem
    monkeypatch.setattr(support, "find_spec", lambda module: object() if module == package else None)
    assert support.hardware_problems(SFTOptions(**changes)) == []
