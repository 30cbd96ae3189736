"""What a look at the nodes says; the nodes are this process, called in other words. tests/cluster has Ray's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from tests.distributed.ray.test_placement import nodes
from trimtab.config.rl_jobs import PPOOptions
from trimtab.distributed.ray import preflight as module
from trimtab.distributed.ray.placement import Engines, Layout, Pool, RunPaths
from trimtab.distributed.ray.preflight import inspector, preflight
from trimtab.errors import UserError
from trimtab.train.rl.checks import locations_of

LAYOUT = Layout((Pool("actor", ("actor",), 2, 1),), None)


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """Two nodes that answer what `look` makes of a request, and what was asked of them."""
    asked = []

    monkeypatch.setattr(module, "TO_APPEAR", 0.3)
    monkeypatch.setattr(module, "living_nodes", lambda: nodes(1, 1))

    def set_up(look=lambda answer, request, node: answer):
        def answers(used, request, stop):
            asked.append(request)
            return {node.id: look(inspector()(request, node.id), request, node.id) for node in used}

        monkeypatch.setattr(module, "_inspect", answers)
        return asked

    return set_up


@pytest.fixture
def places(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return RunPaths(
        [("pretrain", str(model))], [], [("save_path", f"{tmp_path}/out"), ("ckpt_path", f"{tmp_path}/c/k")]
    )


def test_nodes_that_agree_and_share_are_cleared_and_nothing_is_left_behind(cluster, places, tmp_path):
    cluster()
    placement = preflight(LAYOUT, places)
    assert [seat.node.id for seat in placement.workers] == ["n0", "n1"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_folders_that_are_there_stay_as_they_are(cluster, places, tmp_path):
    cluster()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("")
    preflight(LAYOUT, places)
    assert os.listdir(tmp_path / "out") == ["metrics.jsonl"] and not (tmp_path / "c").exists()


def other_torch(answer, request, node):
    return answer | {"versions": answer["versions"] | ({"torch": "2.0.0"} if node == "n1" else {})}


def no_package(answer, request, node):
    return answer | {"versions": dict.fromkeys(answer["versions"])}


def nothing_to_read(answer, request, node):
    elsewhere = {name: f"{path}-not" for name, path in request["read"].items()}
    return inspector()(request | {"read": elsewhere}, node) if node == "n1" else answer


def other_files(answer, request, node):
    (path,) = request["read"].values()
    stale = Path(path).with_name("stale")
    stale.mkdir(exist_ok=True)
    (stale / "config.json").write_text("{ }")
    return inspector()(request | {"read": {name: str(stale) for name in request["read"]}}, node)


def writes_elsewhere(answer, request, node):
    for folder in request["shared"].values():
        os.remove(f"{folder}/.trimtab-{request['token']}-{node}")
    return answer


def may_not_write(answer, request, node):
    return answer | {"unseen": {name: "cannot write (Permission denied) to" for name in request["shared"]}}


@pytest.mark.parametrize(
    "look, told",
    [
        (other_torch, r"node 10\.0\.0\.2 has torch 2\.0\.0, and this machine torch [\d.]+.*same"),
        (no_package, r"node 10\.0\.0\.1 has python not at all, trimtab not at all"),
        (nothing_to_read, r"node 10\.0\.0\.2 cannot read --pretrain .*/model: No such file or directory; put it on"),
        (other_files, r"node 10\.0\.0\.1 has other files at --pretrain .*/model than this machine"),
        (writes_elsewhere, r"node 10\.0\.0\.1 writes what this machine does not see to --save_path"),
        (may_not_write, r"node 10\.0\.0\.1 cannot write \(Permission denied\) to --save_path"),
    ],
)
def test_what_a_node_lacks_is_told(cluster, places, look, told):
    cluster(look)
    with pytest.raises(UserError, match=f"^{told}"):
        preflight(LAYOUT, places)


def test_versions_of_engines_are_asked_where_there_are_engines(cluster, places):
    asked = cluster()
    preflight(LAYOUT, places)
    assert "vllm" not in asked[-1]["packages"]
    preflight(Layout((Pool("actor", ("actor",), 1, 1),), Engines(1, 1, "actor")), places)
    assert "vllm" in asked[-1]["packages"]


@pytest.mark.parametrize("folder", ["save_path", "ckpt_path"])
def test_a_folder_that_one_node_has_for_itself_is_refused(cluster, places, tmp_path, folder):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def look(answer, request, node):
        if node != "n1":
            return answer
        shared = {name: str(elsewhere) if name.startswith(folder) else path for name, path in request["shared"].items()}
        return inspector()(request | {"shared": shared}, node)

    cluster(look)
    with pytest.raises(UserError, match=rf"^node 10\.0\.0\.2 does not see what this machine writes to --{folder} /"):
        preflight(LAYOUT, places)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "model"]


@pytest.mark.parametrize("flag", ["save_path", "use_tensorboard"])
def test_outputs_in_rays_copy_of_the_working_directory_are_refused(tmp_path, monkeypatch, flag):
    copy = tmp_path / "working_dir_files" / "_ray_pkg_0123"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    fixed = {"save_path": "/elsewhere/out", "ckpt_path": "/elsewhere/ckpt", "pretrain": "a/b", "prompt_data": "a/b"}
    options = PPOOptions(**(fixed | {flag: "./final"}))
    with pytest.raises(UserError, match=rf"^--{flag} ./final is inside Ray's copy of the working directory"):
        preflight(LAYOUT, locations_of(options))


def test_places_are_those_that_are_here_and_hub_names_are_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("judge", "rows"):
        (tmp_path / name).mkdir()
    for name in ("prompts.jsonl", "reward.py", "other.py"):
        (tmp_path / name).write_text("")
    options = PPOOptions(
        pretrain="owner/model",
        prompt_data="prompts.jsonl,owner/data,json@rows",
        reward_pretrain="./judge,owner/judge",
        reward_func="reward.py:score",
        remote_rm_url="other.py,http://there:1/get",
        save_path="out",
    )
    places = locations_of(options)
    assert places.read == [
        ("reward_pretrain", "./judge"),
        ("prompt_data", "prompts.jsonl"),
        ("prompt_data", "rows"),
        ("reward_func", "reward.py"),
        ("remote_rm_url", "other.py"),
    ]
    assert places.shared == [("save_path", "out"), ("ckpt_path", options.checkpoint_folder)]


def test_a_node_without_this_package_can_say_so():
    request = {"packages": ("torch",), "read": {}, "shared": {}, "token": "", "patience": 0}
    there = "\n".join(
        (
            "import pickle, sys",
            "sys.modules['trimtab'] = None",  # importing it fails
            "print(pickle.loads(sys.stdin.buffer.read())(" + repr(request) + ", 'n0')['versions']['trimtab'])",
        )
    )
    sent = ray.cloudpickle.dumps(inspector())
    done = subprocess.run([sys.executable, "-c", f"import ray\n{there}"], input=sent, capture_output=True, timeout=120)
    assert done.stdout.decode().strip() == "None", done.stderr.decode()
