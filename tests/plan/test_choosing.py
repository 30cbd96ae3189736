"""How large passes are and how many layers recompute in them, where the plan may choose."""

import dataclasses
import json
import math

import pytest
import yaml

from tests.plan.conftest import LAYERS
from trimtab.config.jobs import SFTOptions
from trimtab.config.parser import parse
from trimtab.distributed.process_group import World
from trimtab.errors import UserError
from trimtab.plan.hardware import NAMED, ClusterHardware
from trimtab.plan.memory import FILL, ProcessMemory
from trimtab.plan.planner import Planner, enough_tokens, fastest_micro_batches, fewest_recomputed, update_seconds
from trimtab.plan.speed import ENOUGH, TimeModel
from trimtab.plan.workload import RowShape, Work
from trimtab.train.launch import with_planned_micro_batches

OPEN = {"bf16": True, "gradient_checkpointing": True, "gradient_checkpointing_layers": "auto"}
WORK = Work(RowShape(0, 64), 2**22, 64)  # a step of many passes


@pytest.fixture(scope="module")
def memory(model) -> ProcessMemory:
    options = SFTOptions(pretrain=model, **OPEN)
    return Planner(options, ClusterHardware(NAMED["H200"]), WORK, propose=True).bare_process()


def clock_with(memory: ProcessMemory, host: float) -> TimeModel:
    """`host`: seconds a layer."""
    clock = TimeModel(memory.options, ClusterHardware(memory.hardware), memory.work, memory.models)
    clock.rates = dataclasses.replace(clock.rates, host=host)
    return clock


def leave(memory: ProcessMemory, room: int) -> None:
    memory.hardware = dataclasses.replace(memory.hardware, memory=math.ceil(room / FILL))


def test_as_few_layers_recompute_as_fit(memory):
    peaks = [memory.at(512, number).peak for number in range(LAYERS + 1)]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) > 4
    for peak in (*peaks, peaks[2] + 1, peaks[3] - 1):
        leave(memory, peak)
        found = fewest_recomputed(memory, 512)
        assert found.recomputed == next(number for number, taken in enumerate(peaks) if taken <= memory.room)
        assert found.peak == peaks[found.recomputed]
    leave(memory, peaks[-1] - 4096)
    assert fewest_recomputed(memory, 512).recomputed == LAYERS, "all, where no number is enough"


def test_smaller_passes_come_before_recomputation_until_they_are_slower(memory):
    leave(memory, memory.at(512, 0).peak)
    large, small = fewest_recomputed(memory, 1024), fewest_recomputed(memory, 512)
    assert large.recomputed > 0 == small.recomputed

    def times(host: float) -> list[float]:
        clock = clock_with(memory, host)
        return [update_seconds(memory, clock, found) for found in (large, small)]

    slow, fast = times(host=0.0)
    assert slow > 1.05 * fast, "what is computed again costs"
    once, twice = times(host=1.0)
    assert twice == pytest.approx(2 * once, rel=0.01), "a pass takes as long whatever is in it"
    memory.work = dataclasses.replace(WORK, tokens=2048)
    by_host, by_device = (fastest_micro_batches(memory, clock_with(memory, host), None) for host in (1.0, 0.0))
    memory.work = WORK
    assert by_host.fits(memory.room) and by_host.tokens > by_device.tokens and by_host.recomputed > 0
    assert by_device.fits(memory.room) and by_device.recomputed == 0 and by_device.tokens > 450


def test_a_pass_has_as_many_tokens_as_make_it_fast_however_large_the_device_is(memory):
    found = []
    for gib in (100, 1000):
        memory.hardware = dataclasses.replace(NAMED["H200"], memory=gib * 2**30)
        clock = clock_with(memory, host=2e-4)
        found.append(fastest_micro_batches(memory, clock, None))
    assert found[0].recomputed == found[1].recomputed == 0
    assert found[0].tokens == found[1].tokens == enough_tokens(memory, clock) < WORK.tokens
    trained = memory.models[0]
    token, whole = clock.one_pass(trained, found[0].tokens, 0) / found[0].tokens, clock.training(trained, 0)
    assert whole < token <= ENOUGH * whole
    assert clock.one_pass(trained, found[0].tokens // 4, 0) / (found[0].tokens // 4) > 1.5 * token


def test_passes_of_a_step_are_about_as_large_as_each_other(memory):
    memory.hardware = NAMED["H200"]
    clock = clock_with(memory, host=5e-5)
    enough = enough_tokens(memory, clock)
    memory.work = dataclasses.replace(WORK, tokens=int(2.1 * enough))
    assert enough_tokens(memory, clock) == pytest.approx(1.05 * enough, rel=0.02)
    memory.work = dataclasses.replace(WORK, rows=RowShape(100, 1000, 2 * enough // 1000), tokens=8 * enough)
    assert enough_tokens(memory, clock) >= 100 + 2 * enough // 1000 * 1000, "but whole groups"
    memory.work = dataclasses.replace(WORK, tokens=enough // 3)
    assert enough_tokens(memory, clock) == enough // 3, "and no larger than the step"
    memory.work = WORK


@pytest.mark.long
def test_a_run_that_leaves_it_open_says_how_many_layers_recompute_and_learns_alike(place, train, monkeypatch, capsys):
    eight = "--micro_train_batch_size 8"
    plain = train("plain", eight)
    monkeypatch.setattr(ProcessMemory, "room", property(lambda self: self.at(10**6, 2).peak))
    tight = train("tight", f"{eight} --gradient_checkpointing --gradient_checkpointing_layers auto")
    assert [row["loss"] for row in tight] == [row["loss"] for row in plain]
    said = capsys.readouterr().out
    options = yaml.safe_load((place / "tight/options.yaml").read_text())
    assert options["gradient_checkpointing"] and options["gradient_checkpointing_layers"] == 2
    assert "in which 2 of 6 layers recompute, by plan" in said
    assert json.loads((place / "tight/manifest.json").read_text())["recomputing_layers"] == 2


def test_what_is_planned_for_one_device_alone_is_said(capsys):
    options = SFTOptions(**OPEN)
    found = with_planned_micro_batches(options, None, World(0, 2), lambda: pytest.fail("nothing is planned"))
    assert found == (options, None) and "all layers recompute: " in capsys.readouterr().out


def test_a_number_of_layers_or_auto_is_understood():
    words = ["--gradient_checkpointing", "--gradient_checkpointing_layers"]
    assert parse(SFTOptions, [*words, "3"]).gradient_checkpointing_layers == 3
    assert parse(SFTOptions, [*words, "auto"]).gradient_checkpointing_layers == "auto"
    assert parse(SFTOptions, [*words, "None"]).gradient_checkpointing_layers is None
    with pytest.raises(UserError, match=r"takes a whole number, not 'few'; or auto$"):
        parse(SFTOptions, [*words, "few"])
