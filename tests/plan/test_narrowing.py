"""A narrowed skeleton has the shapes that one process of a really cut model has."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.tiny import tiny_model
from trimtab.config.jobs import SFTOptions
from trimtab.distributed.fsdp import local
from trimtab.errors import UserError
from trimtab.models.lora import add_adapters
from trimtab.models.parallel.tensor_parallel import apply_tensor_parallel
from trimtab.models.policy import Policy
from trimtab.plan.fake_model import FakeModel, narrow
from trimtab.plan.workload import RowShape


@pytest.fixture(scope="module")
def two():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def skeleton(family: str, rank: int = 0) -> Policy:
    with torch.device("meta"):
        model = tiny_model(family)
        return Policy(add_adapters(model, SFTOptions(lora_rank=rank)) if rank else model)


@pytest.mark.parametrize(("family", "rank"), [("llama", 0), ("llama_tied", 0), ("qwen3", 4), ("mixtral", 0)])
def test_shapes_are_those_of_one_process(family, rank, two):
    narrowed, really = skeleton(family, rank), skeleton(family, rank)
    narrow(narrowed, 2)
    apply_tensor_parallel(really, two)
    assert {name: p.shape for name, p in narrowed.named_parameters()} == {
        name: local(p).shape for name, p in really.named_parameters()
    }


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
def test_inner_activations_are_cut_and_the_residual_stream_is_not(family):
    rows, options = RowShape(0, 128), SFTOptions(bf16=True)
    kept = []
    for parts in (1, 2, 4):
        model = skeleton(family)
        if parts > 1:
            narrow(model, parts)
        kept.append(FakeModel(model, options, accelerator=True).training_pass(rows, 1024).kept)
    assert kept[0] > kept[1] > kept[2]
    assert kept[0] - kept[1] == pytest.approx(2 * (kept[1] - kept[2]), rel=0.1)
    assert kept[2] > 0.3 * kept[0]


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(UserError, match="its 4 attention heads cannot be shared out to 3 processes"):
        narrow(skeleton("llama"), 3)
