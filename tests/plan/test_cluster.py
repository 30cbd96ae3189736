"""Plans for clusters: the tiny model on small devices, where figures can be worked out by hand."""

import dataclasses

import pytest

from trimtab.config.parser import parse
from trimtab.config.resolved_config import settle
from trimtab.config.rl_jobs import GRPOOptions, PPOOptions
from trimtab.distributed.ray.placement import Engines, Layout, Pool
from trimtab.plan.hardware import LINK_SHARE, NAMED, ClusterHardware, Hardware
from trimtab.plan.layouts import cluster_candidates, groupings, layout_flags, layout_of, sizes_of, splits
from trimtab.plan.planner import AS_ASKED, Planner, plan_layouts
from trimtab.plan.printer import conclusions, lines
from trimtab.plan.workload import supposed

DEVICE = Hardware("small", 64 * 2**20, 1e12, 1e12, 1e11, link=1e10)
TWO = ClusterHardware(DEVICE, 2, 4, 4e9)
WORDS = """--prompt_max_len 16 --generate_max_len 16 --rollout_batch_size 32 --train_batch_size 32 --bf16
    --gradient_checkpointing --zero_stage 3 --ray"""


def ppo(model, *more, job=PPOOptions):
    words = f"--pretrain {model} --reward_pretrain {model} {WORDS} {' '.join(more)}".split()
    return settle(parse(job, words))[0]


@pytest.fixture(scope="module")
def planner(model):
    options = ppo(model)
    return Planner(options, TWO, supposed(options), propose=True)


def test_groups_are_whole_machines_or_parts_of_one_and_all_devices_together():
    assert sorted(splits(2, TWO)) == [(4, 4)]
    found = list(splits(3, TWO))
    assert (4, 2, 2) in found and (2, 4, 2) in found and (4, 1, 3) not in found
    assert all(sum(sizes) == 8 for sizes in found)


def test_layouts_are_those_of_the_documents(planner):
    assert groupings(planner.units) == {
        "hybrid": [("actor", "reference", "critic", "reward")],
        "pairs": [("actor", "reference"), ("critic", "reward")],
        "apart": [("actor",), ("reference",), ("critic",), ("reward",)],
        "built-in engine": [("actor", "reference", "critic", "reward")],
    }


@pytest.mark.parametrize("kind", ["hybrid", "pairs", "apart", "built-in engine"])
def test_the_options_that_a_plan_names_ask_for_its_layout(planner, model, kind):
    for layout in cluster_candidates(planner.units, TWO, 1)[kind]:
        assert layout_of(ppo(model, layout_flags(layout)), planner.units) == layout


def test_a_split_model_is_shared_out_and_offload_and_sleep_take_it_away(planner):
    layout = Layout((Pool("actor", ("actor",), 1, 4),), Engines(4, 1, None))
    actor = planner.models[0]

    def parts(planner, **how):
        held = planner.process(layout.pools[0].units, layout.pools[0].size, **how)
        return {part.name: part for part in held.largest_doubling().parts}

    moments = parts(planner)["actor: Adam's moments, 1 / 4"]
    assert moments.size == 8 * actor.learnt // 4 and "rollout" in moments.phases
    assert parts(planner)["actor: fp32 masters, 1 / 4"].size == 4 * actor.learnt // 4
    assert "rollout" not in parts(planner, sleep=True)["actor: Adam's moments, 1 / 4"].phases
    assert "actor: Adam's moments, 1 / 4" not in parts(planner.changed(adam_offload=True))
    whole = parts(planner.changed(zero_stage=0))
    assert whole["actor: Adam's moments, 1 / 1"].size == 8 * actor.learnt
    assert whole["actor: working weights, gathered"].size == actor.weights
    assert parts(planner.changed(zero_stage=2))["actor: working weights, gathered"].size == actor.weights


def test_weights_go_to_engines_over_the_link_that_is_there(planner):
    timing, weights = planner.clock, planner.models[0].weights
    pool = Pool("actor", tuple(planner.units), 1, 4)
    apart, link = timing.sync(Layout((pool,), Engines(4, 1, None)))
    gathered = weights * 3 / 4 / (LINK_SHARE * 1e10)
    assert apart == pytest.approx(gathered + weights / (LINK_SHARE * 4e9 / 4)) and "from one device" in link
    near, link = timing.sync(Layout((dataclasses.replace(pool, per_node=2),), Engines(2, 1, None)))
    assert near == pytest.approx(weights / 2 / (LINK_SHARE * 1e10) + weights / (LINK_SHARE * 1e10))
    shared, link = timing.sync(Layout((pool,), Engines(4, 1, "actor")))
    assert shared == pytest.approx(gathered + weights / timing.bandwidth) and link == "the same device"


def test_twice_the_devices_take_half_the_arithmetic(planner):
    def seconds(devices):
        held = planner.process(("actor",), devices)
        tokens = 1024 * planner.work.tokens
        return planner.clock.update(planner.models[0], held.split, tokens, 1, held.at(64)).arithmetic

    assert seconds(2) == pytest.approx(2 * seconds(4), rel=0.01)


def test_the_best_of_a_kind_is_the_fastest_that_fits(planner):
    for found in planner.best_per_kind():
        layouts = cluster_candidates(planner.units, TWO, 1)[found.kind]
        tried = [planner.tried(found.kind, layout, sleep=True) for layout in layouts]
        assert found.fits and found.whole == min(one.whole for one in tried if one.fits)


def test_advice_follows_from_figures(model):
    several = ppo(model, "--n_samples_per_prompt 4 --prompt_max_len 256 --max_len 300 --adam_offload", job=GRPOOptions)
    plan = plan_layouts(several, dataclasses.replace(TWO, nodes=3))
    told = list(conclusions(plan))
    kinds = {tried.kind: tried for tried in plan.candidates}
    fastest = min(kinds.values(), key=lambda tried: tried.whole)
    assert told[0].startswith(f"{fastest.kind}: {fastest.whole:.0f} s, against")
    assert any(line.startswith("devices of") and "equal parts" in line for line in told)
    assert any("without --adam_offload it fits too" in line for line in told)
    if plan.shown.layout.engines:
        assert any("--enable_prefix_caching" in line for line in told)
    one = plan_layouts(ppo(model, "--adam_offload False"), TWO)
    assert not any("--enable_prefix_caching" in line or "--adam_offload" in line for line in conclusions(one))


def test_too_little_memory_is_said_with_what_would_help(model):
    tight = dataclasses.replace(TWO, hardware=dataclasses.replace(DEVICE, memory=2**18))
    plan = plan_layouts(ppo(model, "--zero_stage 0"), tight)
    assert not any(tried.fits for tried in plan.candidates)
    assert next(conclusions(plan)).startswith("nothing fits")


def test_the_layout_of_the_options_comes_first_and_is_told_part_by_part(model):
    words = "--actor_num_gpus_per_node 4 --colocate_actor_ref --critic_num_gpus_per_node 2 --colocate_critic_reward"
    plan = plan_layouts(ppo(model, words, "--vllm_num_engines 2"), TWO)
    assert plan.shown.kind == AS_ASKED and sizes_of(plan.shown.layout) == [4, 2, 2]
    told = lines(plan, "tiny")
    assert told[0] == "ppo of tiny on 2 machines with 4 x small, 0.1 GiB each"
    assert any(line.startswith("  as the options say  4 : 2 : 2") for line in told)
    assert any(line.startswith("  critic + reward, 2 devices: ") for line in told)
    assert "10 GB/s between devices of a machine, 4 GB/s in and out" in told[-1]


def test_every_named_device_has_its_links():
    assert all(device.link and device.host_link for device in NAMED.values())
    assert NAMED["A800-80G"].link < NAMED["A100-80G"].link
