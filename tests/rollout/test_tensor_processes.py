"""The built-in engine on a policy whose layers are cut over two processes, which hold different amounts of memory."""

from dataclasses import replace

import pytest
import torch

from tests import warm
from tests.models.splitting import load_split, options_of
from tests.rollout.test_builtin_engine import prompts
from tests.rollout.test_partial_rollouts import DRAWN, PROMPTS, SEEDS, assert_same, interrupted
from tests.tiny import tiny_model
from trimtab.distributed.device import find_device
from trimtab.distributed.fsdp import shard
from trimtab.distributed.mesh import Mesh
from trimtab.distributed.process_group import find_world, leave_world
from trimtab.models.parallel.sharded_model import decoder_layers, mesh_of
from trimtab.models.parallel.tensor_parallel import apply_tensor_parallel
from trimtab.models.policy import Policy
from trimtab.models.weight_export import WeightExport
from trimtab.rollout.builtin import engine as engines
from trimtab.rollout.builtin import kv_cache as memory
from trimtab.rollout.builtin.engine import BuiltinEngine
from trimtab.rollout.sampling import SamplingParams
from trimtab.rollout.trajectory import Trajectory

LENGTHS = (5, 17, 33, 16, 1, 48, 7)
PLAIN = SamplingParams(max_new_tokens=12, n=2, stop_token_ids=(2, 3))
SHAPED = SamplingParams(max_new_tokens=9, top_p=0.8, repetition_penalty=1.2, plain_log_probs=True)


def answers(policy: Policy, **settings) -> list[Trajectory]:
    engine = BuiltinEngine(policy, max_num_seqs=4, page_size=4, **settings)
    found = []
    for sampling in (PLAIN, SHAPED, PLAIN):
        found += engine.generate(prompts(LENGTHS), sampling, seeds=list(range(7)))
        engine.trim_memory()
    return found


def shared_policy(family: str, **changes) -> tuple[Policy, Mesh]:
    """Over two processes."""
    mesh = Mesh(find_world(find_device()), tensor=2)
    policy = Policy(tiny_model(family, **changes))
    apply_tensor_parallel(policy, mesh.for_tensor_parallel())
    shard(policy, decoder_layers(policy), mesh, zero_stage=3)
    return policy, mesh


def cut_over_two(family: str, int8: bool) -> None:
    policy, mesh = shared_policy(family)
    expected = answers(Policy(tiny_model(family)), weight_only_int8=int8)
    # The second process has room for two sequences at once, and gives its memory back after every call.
    plenty = memory.free_memory
    engines.free_memory = (lambda device: 0) if mesh.world.rank else plenty
    memory.free_memory = (lambda device: 2**16) if mesh.world.rank else plenty
    assert_same(answers(policy, tensor=mesh.tensor, weight_only_int8=int8), expected, 2e-5)
    leave_world()


@pytest.mark.short(1)
@pytest.mark.parametrize(
    "family, int8",
    [("qwen3", False), ("qwen2", True), ("llama_tied", False), ("mixtral", False), ("mixtral", True)],
)
def test_processes_that_share_every_layer_draw_the_tokens_of_one(family, int8):
    """With int8 weights too: their scales are those of whole layers."""
    assert warm.call_world(cut_over_two, 2, family, int8) == [0, 0]


def write_on(family: str) -> None:
    """Answers that are cut anywhere; the second process has room for two sequences at once."""
    policy, mesh = shared_policy(family)
    given, sampling = {"given": PROMPTS[:2], "seeds": SEEDS[:2]}, replace(DRAWN, max_new_tokens=12)
    expected = BuiltinEngine(Policy(tiny_model(family))).generate(PROMPTS[:2], sampling, seeds=SEEDS[:2])
    if mesh.world.rank:
        memory.free_memory = lambda device: 2**16
    found = interrupted(BuiltinEngine(policy, max_num_seqs=4, page_size=4, tensor=mesh.tensor), sampling, 5, **given)
    assert_same(found, expected, 2e-5)
    leave_world()


@pytest.mark.short(1)
@pytest.mark.parametrize("family", ["llama_tied", "qwen3", "mixtral"])
def test_processes_that_share_every_layer_go_on_from_drafts_as_one_does(family):
    assert warm.call_world(write_on, 2, family) == [0, 0]


def hand_over(cases) -> None:
    """Every tensor that goes to another engine is whole, and that of the model that is not cut."""
    world = find_world(find_device())
    for folder, words, adapters in cases:
        options = options_of("sft", folder, f"{words} --ds_tensor_parallel_size 2")
        mesh = mesh_of(options, world)
        split, alone = load_split("sft", options, mesh).model, load_split("sft", options, None, whole=True).model
        for model in (split, alone):
            torch.manual_seed(3)
            for name, parameter in sorted(model.named_parameters()):
                if "lora_B" in name:
                    fill(parameter)
        found, expected = (dict(WeightExport(p, bf16=False, adapters=adapters).tensors()) for p in (split, alone))
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-6)
    leave_world()


def fill(parameter: torch.Tensor) -> None:
    from trimtab.distributed.fsdp import keep_shard

    keep_shard(torch.randn(parameter.shape) * 0.1, parameter.data)


def test_the_weights_of_a_cut_policy_are_handed_over_whole(tmp_path):
    from trimtab.embedded.sort_task import make_tokenizer

    for family in ("llama", "mixtral"):
        tiny_model(family, vocab_size=len(make_tokenizer())).save_pretrained(tmp_path / family)
        make_tokenizer().save_pretrained(tmp_path / family)
    lora = "--lora_rank 4 --lora_alpha 8"
    cases = [(tmp_path / "llama", lora, False), (tmp_path / "llama", lora, True), (tmp_path / "mixtral", "", False)]
    assert warm.call_world(hand_over, 2, cases) == [0, 0]
