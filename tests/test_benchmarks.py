"""benchmarks: every script runs small on a CPU, and what a device allows is counted rightly."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "h200"


@pytest.fixture
def script(monkeypatch):
    for folder in (FOLDER.parent, FOLDER):
        monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module
    for path in (*FOLDER.glob("*.py"), *FOLDER.parent.glob("*.py")):
        sys.modules.pop(path.stem, None)


def rows_of(capsys) -> list[dict]:
    return [json.loads(line[4:]) for line in capsys.readouterr().out.splitlines() if line.startswith("ROW ")]


def test_the_least_work_of_a_pass_is_that_of_its_matrix_products(script):
    """Counted again by torch, for a model of which everything is a product of matrices."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    shapes, limits = script("shapes"), script("limits")
    shape, length = shapes.TINY, 32
    model = shapes.make_model(shape, torch.device("cpu")).float()
    model.set_attn_implementation("eager")  # every pair of tokens, where causal work is half of it
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(3, 3 + length)[None])
    pairs = 4 * shape.num_hidden_layers * shape.hidden_size * (length**2 - length * (length + 1) / 2)
    rotary = counter.get_total_flops() - limits.forward_products(shape, [length], length) - pairs
    assert 0 <= rotary < 0.001 * counter.get_total_flops()
    rates = limits.Rates(products=1e15, memory=1e12)
    assert rates.update(shape, [length], length) == 3 * limits.forward_products(shape, [length], length) / 1e15
    weights = sum(weight.numel() for name, weight in model.named_parameters() if "norm" not in name)
    step = 2 * weights + 4 * shape.cache_bytes * (10 + 5)
    assert rates.decoding(shape, 4, 10, 10) == pytest.approx(10 * step / 1e12)


@pytest.mark.parametrize("name", ["update", "rollouts"])
def test_a_script_of_the_engine_and_of_passes_runs_small(name, script, capsys):
    script(name).main(["--tiny", *(["360M:8x12"] if name == "rollouts" else [])])
    (row,) = rows_of(capsys)
    # Shares are of times: of a pass this small, on a busy machine, they say nothing.
    assert row["seconds"] > 0 and row["share"] > 0


def test_what_the_host_does_in_a_step_is_counted_small(script, capsys):
    script("host_cost").main(["--answers", "8", "--tokens", "12", "--group", "4", "--rounds", "1"])
    parts = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert len(parts) == 9 and all(float(part.split("|")[-2]) > 0 for part in parts)


@pytest.mark.long
@pytest.mark.parametrize("name", ["grpo", "sft", "dpo"])
def test_a_script_with_its_peer_runs_small(name, script, capsys):
    script(name).main(["--tiny"])
    rows = rows_of(capsys)
    assert [row["who"].split()[0] for row in rows] == ["trimtab", "TRL"]
    assert all(row["seconds"] > 0 for row in rows)


@pytest.mark.long
def test_the_way_to_the_first_update_is_measured_small(script, capsys):
    script("first_update").main(["--tiny", "--before", str(FOLDER.parents[1])])
    rows = rows_of(capsys)
    assert [row["version"] for row in rows] == ["this", "before"] * 2
    assert all(row["seconds"] > row["step"] > 0 for row in rows)


@pytest.mark.long
def test_distillation_is_measured_small(script, capsys):
    script("distill").main(["--tiny"])
    rows = rows_of(capsys)
    assert [row["who"] for row in rows] == ["ours, whole vocabulary", "ours, sampled token", "TRL"]
    assert len({row["seconds"] for row in rows}) == 1 and all(0 <= row["accuracy"] <= 1 for row in rows)


@pytest.mark.long
def test_families_are_measured_small(script, capsys):
    families = ["qwen3_5_text", "gpt_oss", "qwen3_moe", "deepseek_v2"]
    script("families").main(["--tiny", *families, "--lengths", "128"])
    rows = rows_of(capsys)
    assert [row["work"].split()[0] for row in rows] == ["GRPO", "rollout", "errors", "row"] * 4
    assert [row["state_bytes"] > 0 for row in rows if "state_bytes" in row] == [True, False, False, False]


@pytest.mark.long
@pytest.mark.parametrize("name", ["ppo", "gcg"])
def test_a_script_whose_peer_is_no_part_of_the_environment_runs_small(name, script, capsys):
    script(name).main(["--tiny", "--peer", "no"])
    assert [row["who"] for row in rows_of(capsys)] == ["trimtab"]


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, cutlass::bfloat16_t>>", "attention"),
        ("triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_0", "element-wise"),
        ("void at::native::bfloat16_copy_kernel_cuda", "copies"),
        ("nvjet_sm90_tst_192x192_64x3_1x2_h_bz_coopB_NNN", "matrix products"),
        ("_parts", "matrix products"),
        ("_decode", "attention"),
    ],
)
def test_a_kernel_counts_as_what_it_does(kernel, kind, script):
    assert script("profile_step").kind_of(kernel) == kind


@pytest.mark.long
def test_the_pictures_are_drawn(script, tmp_path, capsys):
    script("cost").main(["--tiny", str(tmp_path / "cost.png")])
    script("profile_step").main(["record", "--tiny", str(tmp_path / "after.json")])
    script("profile_step").main(["draw", str(tmp_path / "step.png"), str(tmp_path / "after.json")])
    assert (tmp_path / "cost.png").stat().st_size > 10_000
    assert (tmp_path / "step.png").stat().st_size > 10_000
    assert set(json.loads((tmp_path / "after.json").read_text())) == {"rollout", "scoring", "update"}


@pytest.mark.long
def test_the_whole_table_runs_its_rows_in_forks(tmp_path):
    options = ["--tiny", "--only", "update,dpo,before"]
    words = [sys.executable, str(FOLDER / "everything.py"), str(tmp_path / "out"), *options]
    done = subprocess.run(words, capture_output=True, text=True, cwd=FOLDER.parents[1], timeout=300)
    assert ", forks" in done.stdout
    assert "== update: exit 0" in done.stdout and "== dpo: exit 0" in done.stdout
    assert "before holds no package" in done.stdout and "== before: exit 1" in done.stdout
    rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    assert [row["who"].split(",")[0] for row in rows] == ["trimtab", "trimtab", "TRL"]


@pytest.mark.long
def test_environments_are_measured_small(script, capsys):
    script("environments").main(["--episodes", "20", "--workers", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and all("episodes/s" in line for line in lines)


@pytest.mark.long
def test_what_the_host_does_for_a_turn_is_counted_small(script, capsys):
    small = "--episodes 8 --group 4 --turns 2 --rounds 1 --workers 1 --slots 4"
    script("host_play").main(small.split())
    assert "8 episodes, 16 turns" in capsys.readouterr().out
