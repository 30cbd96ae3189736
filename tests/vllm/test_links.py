"""Engines in processes of their own get their weights over a link."""

import functools
import multiprocessing
import os

import pytest

from tests.vllm.conftest import engine_of, gap, move, write_model
from trimtab.distributed import weight_transfer as link
from trimtab.distributed.weight_transfer import TransferSender, plan_buckets, plan_transfer
from trimtab.models.weight_export import WeightExport
from trimtab.rollout.sampling import SamplingParams

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
SMALL_BUCKETS = functools.partial(plan_buckets, bucket=4096)


def serve(pipe, folder, settings):
    engine = engine_of(folder, None, **settings)
    pipe.send(engine.receivers())
    engine.connect(pipe.recv())
    while (version := pipe.recv()) is not None:
        engine.receive_weights(version)
        pipe.send(engine.generate(PROMPTS, SamplingParams(max_new_tokens=12, n=2)))
    engine.close()


class Apart:
    """Engines in processes of their own, and a policy that sends to them."""

    def __init__(self, folder, policy, engines: int, **settings):
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(engines)]
        self.pipes = [ours for ours, _ in pipes]
        self.processes = [context.Process(target=serve, args=(theirs, folder, settings)) for _, theirs in pipes]
        for process in self.processes:
            process.start()
        self.outgoing = TransferSender(policy.device)
        self.handover = WeightExport(policy, bf16=False, adapters=bool(settings.get("adapter_rank")))
        about = {"adapter_config": self.handover.adapter_config()} if self.handover.adapters else {}
        self.seats = [self._answer(i) for i in range(engines)]
        plan = plan_transfer(
            [self.outgoing.offer()],
            [seat for seats in self.seats for seat in seats],
            backend="gloo",
            tensors=self.handover.described(),
            about=about,
            patience=120.0,
        )
        self._tell(plan)
        self.outgoing.open(plan)

    def _tell(self, value):
        for pipe in self.pipes:
            pipe.send(value)

    def _answer(self, index: int):
        assert self.pipes[index].poll(300), "no answer"
        return self.pipes[index].recv()

    def publish(self, version: int):
        self._tell(version)
        self.outgoing.send(self.handover.tensors())
        return [self._answer(i) for i in range(len(self.pipes))]

    def close(self):
        self._tell(None)
        for process in self.processes:
            process.join(60)
            if process.is_alive():
                process.kill()
        self.outgoing.close()


def send_moved(pipe, folder, *, dies: bool):
    from transformers import AutoModelForCausalLM

    from trimtab.models.policy import Policy

    link.plan_buckets = SMALL_BUCKETS
    policy = Policy(AutoModelForCausalLM.from_pretrained(folder))
    move(policy)
    handover, outgoing = WeightExport(policy, bf16=False), TransferSender(policy.device)
    told = {"backend": "gloo", "tensors": handover.described(), "about": {}, "patience": 600.0}
    plan = plan_transfer([outgoing.offer()], pipe.recv(), **told)
    pipe.send(plan)
    outgoing.open(plan)

    def tensors():
        for index, named in enumerate(handover.tensors()):
            if dies and index == 6:  # some of a layer's queries, keys and values have gone
                os._exit(3)
            yield named

    outgoing.send(tensors())


def test_weights_that_stop_half_way_do_not_spoil_the_next_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(link, "plan_buckets", SMALL_BUCKETS)
    policy = write_model(tmp_path, tie_word_embeddings=True)
    engine = engine_of(tmp_path, None)
    move(policy)
    context = multiprocessing.get_context("spawn")
    for dies in (True, False):
        ours, theirs = context.Pipe()
        sender = context.Process(target=send_moved, args=(theirs, tmp_path), kwargs={"dies": dies})
        sender.start()
        ours.send(engine.receivers())
        assert ours.poll(120), "no plan"
        engine.connect(ours.recv())
        if dies:
            with pytest.raises(RuntimeError):
                engine.receive_weights(1)
        else:
            engine.receive_weights(2)
        sender.join(60)
        assert sender.exitcode == (3 if dies else 0)
    rollouts = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12, n=2))
    assert gap(rollouts, policy) < 1e-3 and {v for r in rollouts for v in r.versions} == {2}
    engine.close()


def test_two_engines_hear_one_sender(tmp_path):
    policy = write_model(tmp_path, tie_word_embeddings=True)
    apart = Apart(tmp_path, policy, 2)
    try:
        for version in (1, 2):
            move(policy)
            first, second = apart.publish(version)
            assert gap(first, policy) < 1e-3 and {v for r in first for v in r.versions} == {version}
            assert [r.ids for r in first] == [r.ids for r in second]
    finally:
        apart.close()


def test_an_adapter_goes_over_the_link(tmp_path):
    from trimtab.config.training_options import LoraOptions
    from trimtab.models.lora import add_adapters
    from trimtab.models.policy import Policy

    plain = write_model(tmp_path)
    options = LoraOptions(lora_rank=4, lora_alpha=8, target_modules=("q_proj", "v_proj", "down_proj"))
    policy = Policy(add_adapters(plain.model, options)).eval()
    apart = Apart(tmp_path, policy, 1, adapter_rank=4)
    try:
        move(policy, 0.3)
        (rollouts,) = apart.publish(1)
        assert gap(rollouts, policy) < 1e-3
    finally:
        apart.close()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_process_of_an_engine_of_two_is_a_receiver(tied, tmp_path):
    policy = write_model(tmp_path, tie_word_embeddings=tied)
    apart = Apart(tmp_path, policy, 1, tensor_parallel=2)
    try:
        assert len(apart.seats[0]) == 2
        move(policy)
        (rollouts,) = apart.publish(1)
        assert gap(rollouts, policy) < 1e-3
    finally:
        apart.close()
