"""The stand-in is as strict as a real device, and what runs say and send on it is right."""

import json
import os
import time
from pathlib import Path

import pytest
import torch

from tests import standin, warm
from tests.standin.at_work import listen
from tests.standin.test_training import built  # noqa: F401

pytestmark = pytest.mark.skipif(standin.why_not() is not None, reason=str(standin.why_not()))


def test_what_assumes_another_device_fails_on_it(tmp_path):
    assert warm.call(be_strict, tmp_path) == 0, (tmp_path / "log").read_text()


def be_strict(folder: Path) -> None:
    listen(folder / "log")
    standin.install()
    from trimtab.distributed.device import find_device, free_memory, is_out_of_memory, total_memory

    device = find_device()
    assert (device.torch, device.name, device.kind.collectives) == (torch.device("npu:0"), "Stand-in", "hccl")
    x, before = torch.ones(4, 4, device=device.torch), standin.kernels()
    assert not x.is_cpu and not x.is_cuda
    (x @ x).sum()
    assert standin.kernels() == before + 2
    for wrong in (
        lambda: x.to("cuda"),
        lambda: torch.cuda.synchronize(),
        lambda: x + torch.ones(4, 4),
        lambda: torch.nn.functional.linear(x, torch.ones(4, 4)),
        lambda: x.double() * 2,
        lambda: x + torch.ones(4, 4, device="npu:1"),
        lambda: x.numpy(),
    ):
        with pytest.raises((RuntimeError, AssertionError, TypeError)):
            wrong()
    total = total_memory(device.torch)
    torch.ops.standin.limit(0, torch.ops.standin.held(0) + 2**20)
    assert free_memory(device.torch) == 2**20 < total
    with pytest.raises(torch.OutOfMemoryError) as short:
        torch.empty(2**20, device=device.torch)
    assert is_out_of_memory(short.value)


def test_a_run_that_asks_for_what_the_device_lacks_is_refused_before_anything_is_read(tmp_path):
    assert warm.call(refuse, tmp_path) == 0, (tmp_path / "log").read_text()
    # torch tells the process that the stand-in replaces operators.
    said = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("trimtab ")]
    assert [line.split(": ")[2].split(" is not offered on an Ascend NPU")[0] for line in said] == [
        "--ring_attn_size 2",
        "--ds_tensor_parallel_size 2",
        "--load_in_4bit",
    ]


def refuse(folder: Path) -> None:
    """Nothing of the model can be read."""
    listen(folder / "log")
    standin.install()
    from trimtab.cli.main import main

    os.environ["WORLD_SIZE"] = "2"
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("no JSON")
    (folder / "model" / "model.safetensors").touch()
    (folder / "rows.jsonl").write_text("{}\n")
    for asked in (
        "--ring_attn_size 2",
        "--ds_tensor_parallel_size 2",
        "--load_in_4bit --lora_rank 4 --bf16 --zero_stage 0",
    ):
        words = f"sft --pretrain {folder}/model --dataset {folder}/rows.jsonl --save_path {folder}/out {asked}"
        assert main(words.split()) == 2


@pytest.mark.parametrize("places", [(0, 1), (0, 0)], ids=["a device each", "one device"])
def test_weights_go_to_another_process_by_the_devices_library_or_around_it(tmp_path, places):
    assert warm.call_world(send_or_receive, 2, tmp_path, places) == [0, 0], [
        (tmp_path / f"log.{rank}").read_text() for rank in range(2)
    ]


def send_or_receive(folder: Path, places: tuple[int, int]) -> None:
    rank = int(os.environ["RANK"])
    listen(folder / f"log.{rank}")
    standin.install()
    from tests.standin.collectives import Collectives
    from trimtab.distributed.weight_transfer import (
        TransferSender,
        describe_receiver,
        join_as_receiver,
        plan_transfer,
        tensor_specs,
    )

    torch.accelerator.set_device_index(places[rank])
    device = torch.device("npu", places[rank])
    sent = {"weight": torch.arange(6.0).view(2, 3).bfloat16(), "bias": torch.ones(3)}
    if rank == 1:
        tell(folder / "seat", [describe_receiver(device)])
        link = join_as_receiver(told(folder / "plan"), device)
        with link.receiving() as tensors:
            received = dict(tensors)
        assert all(torch.equal(received[name].cpu(), tensor) for name, tensor in sent.items())
        assert {tensor.device.type for tensor in received.values()} == {"npu" if link.way == "hccl" else "cpu"}
    else:
        outgoing = TransferSender(device)
        offer = outgoing.offer()
        common = {"tensors": tensor_specs(sent.items()), "about": {}, "patience": 30.0}
        plan = plan_transfer([offer], told(folder / "seat"), backend=offer["library"], **common)
        assert [entry["way"] for entry in plan] == ["hccl" if len(set(places)) == 2 else "gloo"]
        tell(folder / "plan", plan)
        outgoing.open(plan)
        outgoing.send((name, tensor.to(device)) for name, tensor in sent.items())
        outgoing.close()
    assert (Collectives.broadcasts > 0) == (len(set(places)) == 2)


def tell(path: Path, value: list) -> None:
    path.with_suffix(".unfinished").write_text(json.dumps(value))
    path.with_suffix(".unfinished").rename(path)


def told(path: Path) -> list:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return json.loads(path.read_text())
