from pathlib import Path

import pytest
import torch

from trimtab.distributed import device, random_state
from trimtab.distributed.device import (
    DEVICE_KINDS,
    LACKING,
    OTHER_DEVICE,
    Device,
    choose_collectives,
    find_device,
    has_graphs,
    has_kernels,
    kind_of_resource,
    visible_devices_env,
    widest,
)
from trimtab.distributed.supervision import PER_DEVICE
from trimtab.errors import UserError


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


def test_the_table_names_everything_a_run_may_be_refused_for():
    asked = {feature for kind in DEVICE_KINDS.values() for feature in kind.lacks} | OTHER_DEVICE.lacks
    assert asked == LACKING
    assert DEVICE_KINDS["npu"].lacking("four bit") == "an Ascend NPU"
    assert DEVICE_KINDS["cuda"].lacking("four bit") is None
    with pytest.raises(AssertionError):
        DEVICE_KINDS["npu"].lacking("fourbit")  # a feature that no row knows would be offered everywhere


@pytest.mark.parametrize("kind", [*DEVICE_KINDS, "other"])
def test_what_is_captured_has_kernels_in_it_and_what_ray_counts_can_be_shown(kind):
    row = DEVICE_KINDS.get(kind, OTHER_DEVICE)
    assert row.triton or not row.graphs
    assert (row.visible is None) == (row.resource is None)


def test_a_process_is_shown_devices_in_the_words_of_their_kind():
    for kind, variable in (("npu", "ASCEND_RT_VISIBLE_DEVICES"), ("cuda", "CUDA_VISIBLE_DEVICES")):
        shown = visible_devices_env(DEVICE_KINDS[kind], ["3", "1"])
        assert shown == {variable: "1,3", f"RAY_EXPERIMENTAL_NOSET_{variable}": "1"}
    for resource, kind in (("NPU", "npu"), ("GPU", "cuda"), (None, "cpu")):
        assert kind_of_resource(resource) is DEVICE_KINDS[kind]


@pytest.mark.parametrize(
    "kind, double, kernels", [("cpu", True, False), ("xpu", False, False), ("mps", False, False), ("hpu", False, False)]
)
def test_a_device_is_used_by_what_the_table_says_of_it(kind, double, kernels):
    found = torch.device(kind)
    assert (widest(found) == torch.float64) is double
    assert has_kernels(found) is has_graphs(found) is kernels


class Generator:
    """A device's module, as torch has one for each."""

    def __init__(self):
        self.state = torch.arange(4, dtype=torch.uint8)

    def get_rng_state(self):
        return self.state.clone()

    def set_rng_state(self, state):
        self.state = state


def test_random_state_is_kept_under_the_devices_name_and_that_of_another_is_left(monkeypatch):
    """Checkpoints that were made on one kind of device are read there, and do no harm elsewhere."""
    module = Generator()
    monkeypatch.setattr(random_state, "accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    saved = random_state.random_state()
    assert saved["cuda"] == "00010203"
    module.state = torch.zeros(4, dtype=torch.uint8)
    random_state.restore_random_state(saved)
    assert module.state.tolist() == [0, 1, 2, 3]
    monkeypatch.setattr(random_state, "accelerator", lambda: torch.device("xpu"))
    module.state = torch.full((4,), 7, dtype=torch.uint8)
    random_state.restore_random_state(saved)
    assert module.state.tolist() == [7, 7, 7, 7]
    with random_state.preserve_rng_state():
        drawn, module.state = torch.rand(3), module.state * 0
    assert module.state.tolist() == [7, 7, 7, 7]
    random_state.restore_random_state(saved)
    assert torch.equal(torch.rand(3), drawn)


def test_a_package_of_a_device_that_cannot_be_imported_is_named(monkeypatch):
    def broken(name):
        raise ImportError("libascend_hal.so: cannot open shared object file\nand more")

    monkeypatch.setattr(device, "find_spec", lambda name: object())
    monkeypatch.setattr(device.importlib, "import_module", broken)
    device._import_extensions.cache_clear()
    with pytest.raises(
        UserError, match=r"torch_npu is installed and cannot be imported \(libascend_hal.so: [^\n]*AUTOLOAD=0"
    ):
        device.accelerator()
    monkeypatch.setenv(device.AUTOLOAD, "0")
    device.accelerator()  # goes without
    device._import_extensions.cache_clear()


PAGE = Path(__file__).parents[2] / "docs" / "ascend.md"
COLUMNS = ("collectives", "resource", "visible", "bf16", "float64", "fused_adam", "triton", "graphs", "varlen")


def test_the_table_of_the_page_is_the_codes():
    def told(value):
        return {None: "", True: "yes", False: ""}[value] if not isinstance(value, str) else f"`{value}`"

    page = PAGE.read_text()
    for name, kind in DEVICE_KINDS.items():
        row = f"| {kind.name} (`{name}`) | {' | '.join(told(getattr(kind, column)) for column in COLUMNS)} |"
        assert row in page, row
        refused = ", ".join(sorted(kind.lacks - {"flash-attn"})) or "nothing"
        assert f"| {kind.name} | {refused} |" in page, (kind.name, refused)


# ---- several processes on one device


@pytest.mark.parametrize(
    "kind, own, asked, each, chosen",
    [
        ("cuda", "nccl", "auto", 1, "nccl"),
        ("cuda", "nccl", "nccl", 1, "nccl"),
        ("cuda", "nccl", "auto", 2, "gloo"),
        ("cuda", "nccl", "gloo", 1, "gloo"),
        ("cuda", "nccl", "gloo", 4, "gloo"),
        ("cpu", "gloo", "auto", 1, "gloo"),
        ("cpu", "gloo", "gloo", 1, "gloo"),
        ("npu", "hccl", "auto", 1, "hccl"),
        ("mps", None, "auto", 1, None),
    ],
)
def test_processes_that_share_a_device_communicate_through_gloo(kind, own, asked, each, chosen):
    assert choose_collectives(kind, own, asked, each) == chosen


@pytest.mark.parametrize(
    "kind, own, asked, each, mistake",
    [
        ("cuda", "nccl", "nccl", 2, "2 processes would share a device, which nccl refuses; use gloo, or start fewer"),
        ("cpu", "gloo", "nccl", 1, "the library of this device (cpu) is gloo; leave it out"),
        ("npu", "hccl", "auto", 2, "gloo does not work on npu devices"),
        ("npu", "hccl", "gloo", 1, "gloo does not work on npu devices"),
    ],
)
def test_a_backend_that_cannot_work_is_refused_in_one_line(kind, own, asked, each, mistake):
    with pytest.raises(UserError) as refused:
        choose_collectives(kind, own, asked, each)
    assert mistake in str(refused.value) and "\n" not in str(refused.value)


def test_workers_that_see_their_own_device_alone_do_not_share_it(monkeypatch):
    """Ray shows each of eight processes of a machine one device."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert device.processes_per_device(1) == 8
    monkeypatch.setenv(PER_DEVICE, "1")
    assert device.processes_per_device(1) == 1


@pytest.mark.parametrize("local_rank, processes, index", [(0, 2, 0), (1, 2, 0), (3, 4, 1), (1, 1, None)])
def test_local_processes_share_the_devices_there_are(monkeypatch, local_rank, processes, index):
    """On two devices if there are four processes, else on one. A launcher that does not say how many processes it
    started cannot be trusted to want that."""
    devices, used = 1 + (processes == 4), []
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr(device, "accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    monkeypatch.setattr(torch.accelerator, "set_device_index", used.append)
    monkeypatch.setattr(torch, "get_device_module", lambda _: None)
    if index is None:
        with pytest.raises(UserError, match="process 1 of this machine has no accelerator"):
            find_device()
    else:
        assert find_device().torch == torch.device("cuda", index) and used == [index]
