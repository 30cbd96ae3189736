from pathlib import Path

import pytest
import torch

from trimtab.distributed.device import Device


@pytest.mark.parametrize(
    "described, fast",
    [
        ("flags : fpu avx512f avx512_bf16 amx_tile", True),
        ("Features : fp asimd i8mm bf16 dgh", True),
        ("Features : fp asimd i8mm", False),
        ("flags : fpu avx2 not_bf16_at_all", False),
    ],
)
def test_fast_bf16_is_known_by_the_flags_of_every_kind_of_cpu(monkeypatch, described, fast):
    monkeypatch.setattr(Path, "read_text", lambda path: described)
    assert Device(torch.device("cpu"), "").has_fast_bf16() is fast
