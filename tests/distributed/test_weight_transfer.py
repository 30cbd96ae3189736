"""Tensors from one process to others that are no world together."""

import multiprocessing
import os
import socket

import pytest
import torch

from trimtab.distributed.process_group import init_process_group
from trimtab.distributed.weight_transfer import (
    TransferSender,
    describe_receiver,
    join_as_receiver,
    pack_buckets,
    plan_buckets,
    plan_transfer,
    tensor_specs,
    unpack_bucket,
)
from trimtab.errors import UserError

CPU = torch.device("cpu")


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(2.0),
        "long": torch.randn(1000),
        "c": torch.arange(4),
    }


def test_buckets_hold_every_tensor_as_it_was():
    sent = weights()
    cut = plan_buckets(tensor_specs(sent.items()), bucket=200)
    assert len(cut) > 2 and max(len(part) for part in cut) > 1
    found = {
        name: tensor
        for part, bucket in zip(cut, pack_buckets(sent.items(), cut, CPU))
        for name, tensor in unpack_bucket(bucket, part)
    }
    assert list(found) == list(sent)
    for name, tensor in sent.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_tensors_in_another_order_than_was_told_are_noticed():
    sent = weights()
    with pytest.raises(AssertionError):
        list(pack_buckets(reversed(sent.items()), plan_buckets(tensor_specs(sent.items())), CPU))


def connect(*targets, patience: float = 30.0):
    """A sender, a process of each of these functions that is connected with it, and what they put there."""
    context = multiprocessing.get_context("fork")
    seats, results, plans = context.Queue(), context.Queue(), [context.Queue() for _ in targets]
    receivers = [context.Process(target=run, args=(seats, own, results)) for run, own in zip(targets, plans)]
    for receiver in receivers:
        receiver.start()
    sender = TransferSender(CPU)
    offer, found = sender.offer(), [seats.get(timeout=30) for _ in targets]
    specs = tensor_specs(weights().items())
    plan = plan_transfer([offer], found, backend="gloo", tensors=specs, about={}, patience=patience)
    for own in plans:
        own.put(plan)
    sender.open(plan)
    return sender, receivers, results


def receive_twice(seats, plans, results):
    seats.put(describe_receiver(CPU))
    link = join_as_receiver(plans.get(), CPU)
    for _ in range(2):
        with link.receiving() as tensors:
            results.put({name: tensor.float().sum().item() for name, tensor in tensors})
    link.close()


def test_two_receivers_get_what_is_sent_and_again_after_it_has_changed():
    outgoing, receivers, results = connect(receive_twice, receive_twice)
    for seed in range(2):
        outgoing.send(weights(seed).items())
        expected = {name: tensor.float().sum().item() for name, tensor in weights(seed).items()}
        assert [results.get(timeout=30) for _ in receivers] == [expected] * 2
    outgoing.close()
    for receiver in receivers:
        receiver.join(30)
        assert receiver.exitcode == 0


def receive_and_die(seats, plans, results):
    seats.put(describe_receiver(CPU))
    with join_as_receiver(plans.get(), CPU).receiving() as tensors:
        next(tensors)
        os._exit(3)


def receive_what_comes(seats, plans, results):
    seats.put(describe_receiver(CPU))
    found = {}
    try:
        with join_as_receiver(plans.get(), CPU).receiving() as tensors:
            for name, tensor in tensors:
                found[name] = tensor.float().sum().item()
    except RuntimeError:
        results.put(found)


def test_a_receiver_that_dies_ends_nobodys_gathering_or_taking_in(monkeypatch):
    """Those that gather with the sender, and what takes tensors in, would else be left in the middle."""
    monkeypatch.setattr(
        "trimtab.distributed.weight_transfer.plan_buckets", lambda tensors: plan_buckets(tensors, bucket=16)
    )
    outgoing, (dying, other), results = connect(receive_and_die, receive_what_comes, patience=600.0)
    gathered = []

    def gathering():
        for name, tensor in weights().items():
            gathered.append(name)
            yield name, tensor
            if name == "a":
                dying.join(30)

    with pytest.raises(RuntimeError):
        outgoing.send(gathering())
    assert gathered == list(weights())
    received = results.get(timeout=30)
    assert list(received) == list(weights()) and received["c"] == 0
    assert received["a"] == weights()["a"].sum().item()
    other.join(30)
    assert (dying.exitcode, other.exitcode) == (3, 0)
    outgoing.close()


def test_the_door_is_open_on_the_address_of_the_node_alone():
    sender = TransferSender(CPU)
    address, port = sender.offer()["store"]
    assert address == "127.0.0.1" == sender._socket.getsockname()[0]
    sender.close()
    with pytest.raises(OSError):
        socket.create_connection((address, port), timeout=1)


def test_a_device_without_collectives_sends_through_main_memory(monkeypatch):
    monkeypatch.setattr(
        torch.distributed, "get_default_backend_for_device", int
    )  # a ValueError, as for a device unknown to it
    sender = TransferSender(torch.device("mps"))
    offer = sender.offer()
    assert offer["library"] == "gloo" and not offer["shares"]
    sender.close()
    with pytest.raises(UserError, match=r"^an Apple GPU has no collectives in this torch: start one process$"):
        init_process_group(torch.device("mps"))


def test_a_receiver_on_a_senders_device_shares_its_memory():
    offers = [{"store": ["h", number + 1], "device": f"gpu{number}", "shares": True} for number in range(2)]
    told = {"backend": "nccl", "tensors": [], "about": {}, "patience": 1.0}

    def links(*devices):
        seats = [{"seat": str(i), "device": device} for i, device in enumerate(devices)]
        return [(entry["store"][1], entry["way"], entry["seats"]) for entry in plan_transfer(offers, seats, **told)]

    assert links("gpu0", "gpu1") == [(1, "shared", ["0"]), (2, "shared", ["1"])]
    assert links("gpu2", "gpu3") == [(1, "nccl", ["0", "1"])]
    assert links("gpu1", "gpu2") == [(2, "shared", ["0"]), (1, "nccl", ["1"])]
    assert links("gpu0", "gpu2") == [(1, "gloo", ["0", "1"])]
