from dataclasses import dataclass

import pytest
import torch

from trimtab.distributed.mesh import Mesh
from trimtab.distributed.process_group import World
from trimtab.errors import UserError
from trimtab.train import checkpoint
from trimtab.train.checkpoint import Checkpoints, ShardedTensors, reading_checkpoint, write_sharded


def tensors(value=0.0, size=1000):
    return {"weight/a": torch.full((size,), value), "step/a": torch.tensor(3.0)}


def writing(step, value=0.0):
    return lambda folder: write_sharded(folder, tensors(value), Mesh(), step)


def state(step):
    return {"counters": {"step": step}, "manifest": {}, "random": []}


def save(store, step, value=0.0, **more):
    return store.save(step, writing(step, value), state(step), **more)


def read(store):
    path, _ = store.load()
    with reading_checkpoint(path):
        return ShardedTensors(path)


def make(folder, keep=3, keep_gib=1e8):
    return Checkpoints(folder, keep=keep, keep_gib=keep_gib)


def test_what_was_saved_is_loaded(tmp_path):
    store = make(tmp_path)
    save(store, 5, 1.5)
    loaded, (_, found) = read(make(tmp_path)), make(tmp_path).load()
    assert torch.equal(loaded.whole("weight/a"), tensors(1.5)["weight/a"]) and loaded.whole("step/a").shape == ()
    assert found["counters"]["step"] == 5


def test_nothing_saved_loads_nothing(tmp_path):
    assert make(tmp_path / "absent").load() is None


@pytest.mark.parametrize("kind", ["absolute", "relative", "nested", "empty", "binary"])
def test_latest_cannot_point_outside_its_folder(tmp_path, kind):
    save(make(tmp_path / "other"), 7)
    store = make(tmp_path / "own")
    save(store, 1)
    named = {
        "absolute": str(tmp_path / "other" / "global_step7"),
        "relative": "../other/global_step7",
        "nested": "global_step1/../../other/global_step7",
        "empty": "",
        "binary": b"\xff\xfe\x00",
    }[kind]
    (tmp_path / "own" / "latest").write_bytes(named if isinstance(named, bytes) else named.encode())
    with pytest.raises(UserError, match="no checkpoint of this folder"):
        store.load()


def test_oldest_go_first_and_the_newest_always_stays(tmp_path):
    store = make(tmp_path, keep=2)
    for step in (2, 10, 9):
        save(store, step, export=lambda folder: folder.mkdir())
    assert sorted(p.name for p in tmp_path.glob("global*")) == [
        "global_step10", "global_step10_hf", "global_step9", "global_step9_hf",
    ]  # fmt: skip
    assert store.latest().name == "global_step9"
    tight = make(tmp_path, keep=5, keep_gib=1e-9)
    save(tight, 11)
    assert [p.name for p in sorted(tmp_path.glob("global*"))] == ["global_step11"]


def test_an_interrupted_write_is_ignored_and_cleaned(tmp_path):
    store = make(tmp_path)
    save(store, 1)
    half = tmp_path / ".writing-global_step2-123"
    half.mkdir()
    (half / "tensors.safetensors").write_bytes(b"half")
    assert store.load()[1]["counters"]["step"] == 1
    save(store, 3)
    assert not half.exists()


def test_a_lost_pointer_finds_the_newest(tmp_path):
    store = make(tmp_path)
    for step in (9, 10):
        save(store, step)
    (tmp_path / "latest").unlink()
    assert store.latest().name == "global_step10"


def test_saving_a_step_again_replaces_it(tmp_path):
    store = make(tmp_path)
    save(store, 1, 1.0)
    save(store, 1, 2.0)
    assert read(store).whole("weight/a")[0] == 2.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step1", "latest"]


def test_a_damaged_checkpoint_is_named(tmp_path):
    store = make(tmp_path)
    save(store, 1)
    (tmp_path / "global_step1" / "tensors.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(UserError, match=r"global_step1.*damaged"):
        read(store)


def test_a_checkpoint_set_aside_for_a_successor_that_never_came_is_brought_back(tmp_path):
    store = make(tmp_path)
    save(store, 4, 1.0)
    (tmp_path / "global_step4").rename(tmp_path / ".old-global_step4")  # killed between two renames
    assert make(tmp_path).load()[1]["counters"]["step"] == 4
    save(store, 5, 2.0)
    assert (tmp_path / "global_step4").exists()


def test_a_missing_part_is_noticed(tmp_path):
    store = make(tmp_path)
    folder = save(store, 1)
    (folder / "tensors.safetensors").rename(folder / "tensors-00000-of-00002.safetensors")
    with pytest.raises(UserError, match=r"tensors\.safetensors is missing"):
        store.load()
    with pytest.raises(UserError, match="1 of 2 parts"), reading_checkpoint(folder):
        ShardedTensors(folder)


def test_only_exports_are_pruned_too(tmp_path):
    store = make(tmp_path, keep=2)
    for step in (1, 2, 10):
        store.export_only(step, lambda folder: folder.mkdir(parents=True))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step10_hf", "global_step2_hf"]


def test_a_rescued_checkpoint_takes_the_first_place_with_room_and_makes_no_other(tmp_path, monkeypatch):
    def no_room(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "new_temporary_folder", no_room)
    store = Checkpoints(tmp_path / "own", keep=3, keep_gib=1e8, run=tmp_path / "run")
    assert f"step 5 is kept in {tmp_path}/own" in store.rescue(5, writing(5), state(5))
    assert [path.name for path in tmp_path.iterdir()] == ["own"]
    (tmp_path / "file").touch()  # where no folder can be made
    lost = Checkpoints(tmp_path / "file" / "own", keep=3, keep_gib=1e8, run=tmp_path / "file" / "run")
    assert "there is no room for a checkpoint of step 5 anywhere" in lost.rescue(5, writing(5), state(5))


@dataclass(frozen=True)
class SecondOfTwo(World):
    """Hears what the first process would have said."""

    rank: int = 1
    size: int = 2
    first: object = None

    def gather(self, value):
        return [self.first, value]


def test_another_process_hears_of_the_checkpoints_from_the_first(tmp_path):
    save(make(tmp_path), 1)
    (tmp_path / "global_step1").rename(tmp_path / ".old-global_step1")  # the first one brings it back in a moment
    found = [tmp_path / "global_step1"]
    store = Checkpoints(tmp_path, keep=3, keep_gib=1e8, world=SecondOfTwo(first=(found, None)))
    assert store._candidates() == found
    with pytest.raises(UserError, match="told by the first"):
        Checkpoints(tmp_path, keep=3, keep_gib=1e8, world=SecondOfTwo(first=([], "told by the first"))).load()
