"""Planned memory of one rank of large runs against what rehearsals of them took on an H200 (docs/plan.md)."""

import pytest

from benchmarks.h200.rehearse import CASES
from trimtab.config.jobs import JOBS
from trimtab.config.parser import parse
from trimtab.config.resolved_config import settle
from trimtab.plan.hardware import GIB, NAMED, ClusterHardware
from trimtab.plan.planner import Plan, Planner
from trimtab.plan.workload import supposed, with_sized_models

REHEARSED = {
    "70B on 64, ZeRO 3": 34.35,
    "405B on 512, ZeRO 3": 67.76,
    "8x22B on 64, ZeRO 3": 59.46,
    "8B on 8, ZeRO 3": 23.67,
}


@pytest.mark.parametrize("case", REHEARSED)
def test_planned_memory_is_what_a_rank_took(case, tmp_path):
    verb, *words = CASES[case].split()
    options = with_sized_models(settle(parse(JOBS[verb], words))[0], tmp_path)
    machines = ClusterHardware(NAMED["H200"], options.rehearse // 8, 8, 100e9)
    planner = Planner(options, machines, supposed(options), propose=False)
    planned = Plan(planner, planner.one_pool()).memory.peak / GIB
    assert planned == pytest.approx(REHEARSED[case], rel=0.1)
