import pytest
import torch

from tests.tiny import tiny_model
from trimtab.config.jobs import AttackOptions
from trimtab.distributed.device import find_device
from trimtab.distributed.mesh import Mesh
from trimtab.errors import UserError
from trimtab.train.checkpoint import Checkpoints, restored_policy, write_sharded


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_model(seed=0).save_pretrained(folder)
    return str(folder)


def trained_checkpoint(folder, step, model, role=""):
    weights = {f"weight/{name}": p for name, p in model.named_parameters()}
    state = {"counters": {"step": step}, "manifest": {}, "random": []}
    store = Checkpoints(folder, keep=3, keep_gib=1e8)
    store.save(step, lambda place: write_sharded(place / role, weights, Mesh(), step), state)


def weights(policy):
    return {name: parameter.detach() for name, parameter in policy.model.named_parameters()}


def same(policy, model):
    return all(torch.equal(p, weights(policy)[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("role", ["", "actor"])
def test_the_newest_checkpoint_of_training_gives_the_weights(base, tmp_path, role, capsys):
    for step in (2, 10):
        trained_checkpoint(tmp_path, step, tiny_model(seed=step), role)
    policy = restored_policy(base, str(tmp_path), AttackOptions(), find_device())
    assert same(policy, tiny_model(seed=10)) and not any(p.requires_grad for p in policy.parameters())
    assert f"weights of {tmp_path / 'global_step10' / role}\n" in capsys.readouterr().out


def test_a_model_folder_and_no_checkpoint_at_all_give_their_own_weights(base, tmp_path):
    tiny_model(seed=5).save_pretrained(tmp_path)
    assert same(restored_policy(base, str(tmp_path), AttackOptions(), find_device()), tiny_model(seed=5))
    assert same(restored_policy(base, None, AttackOptions(), find_device()), tiny_model(seed=0))


def test_a_folder_without_checkpoint_and_one_of_another_model_are_one_line(base, tmp_path):
    with pytest.raises(UserError, match=r"--ckpt_path .*neither a model nor a checkpoint"):
        restored_policy(base, str(tmp_path), AttackOptions(), find_device())
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="an adapter, not a model; merge it"):
        restored_policy(base, str(tmp_path / "adapter"), AttackOptions(), find_device())
    trained_checkpoint(tmp_path, 1, tiny_model("gpt2"))
    with pytest.raises(UserError, match="not those of --pretrain"):
        restored_policy(base, str(tmp_path), AttackOptions(), find_device())
