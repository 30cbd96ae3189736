from trimtab.config.resolved_config import settle
from trimtab.config.rl_jobs import PPOOptions, TailOptions
from trimtab.train.rl.roles import make_units_in_processes
from trimtab.train.tail.proposal import tail_units_of

MODELS = {"pretrain": "a/b", "prompt_data": "a/b", "reward_pretrain": "a/b"}
PLACED = {f"{role}_num_gpus_per_node": 2 for role in ("actor", "ref", "critic", "reward")}


def ranks(units) -> dict[str, list[int]]:
    return {unit.name: list(unit.ranks) for unit in units}


def test_processes_of_a_launcher_are_shared_and_the_last_ones_hold_what_needs_few():
    options = PPOOptions(**MODELS, nproc=4, ref_num_gpus_per_node=2, reward_num_gpus_per_node=1)
    found = ranks(make_units_in_processes(options, 4))
    assert found == {"actor": [0, 1, 2, 3], "reference": [2, 3], "critic": [0, 1, 2, 3], "reward": [3]}


def test_in_a_cluster_every_model_is_where_the_layout_says():
    options, _ = settle(PPOOptions(**MODELS, **PLACED, colocate_actor_ref=True, ray=True))
    found = ranks(make_units_in_processes(options, 1))
    assert found == {"actor": [0, 1], "reference": [0, 1], "critic": [2, 3], "reward": [4, 5]}


def test_the_policy_as_it_was_is_where_the_reference_would_be():
    tail = {"init_kl_coef": 0.0, "evaluate_heldout_sampling": True, "n_samples_per_prompt": 2}
    options, _ = settle(TailOptions(**MODELS, **PLACED, **tail, ray=True))
    assert ranks(tail_units_of(options, 1)) == {"actor": [0, 1], "reward": [2, 3], "start": [4, 5]}
