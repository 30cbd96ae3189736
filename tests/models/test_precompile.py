"""Kernels compiled ahead of a pass."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch._dynamo  # looks for Triton, so before there is a stand-in for it

from trimtab.models.precompile import compile_together, is_noting, one_loads_at_a_time

CPU = torch.device("cpu")


def parameter(name: str, *, constexpr: bool = False, plain: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, is_constexpr=constexpr, do_not_specialize=plain, do_not_specialize_on_alignment=False
    )


class Kernel:
    """Has what Triton's kernels have: run() compiles, and launches unless it is a warm-up."""

    def __init__(self, log: list):
        self.log, self.arg_names = log, ["x", "rows", "heads", "BLOCK"]
        self.params = [
            parameter("x"), parameter("rows", plain=True), parameter("heads"), parameter("BLOCK", constexpr=True)
        ]  # fmt: skip

    def __getitem__(self, grid):
        return lambda *given, **named: self.run(*given, grid=grid, warmup=False, **named)

    def run(self, *given, grid, warmup, **named):
        self.log.append(("compiled" if warmup else "launched", named["BLOCK"], given[2]))
        return Compiled(self.log, named["BLOCK"])


class Compiled:
    def __init__(self, log: list, block: int):
        self.log, self.block = log, block

    @property
    def run(self):
        self.log.append(("loaded", self.block))


@pytest.fixture
def log(monkeypatch) -> list:
    runtime, jit, kernels = (ModuleType(name) for name in ("triton.runtime", "triton.runtime.jit", "kernels"))
    runtime.driver, runtime.build = SimpleNamespace(active=SimpleNamespace()), SimpleNamespace()
    jit.JITFunction, kernels.INTERPRETED = Kernel, False
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", jit)
    monkeypatch.setitem(sys.modules, "trimtab.models.layer_kernels", kernels)
    return []


def test_each_kind_of_launch_is_compiled_and_loaded_and_none_is_launched(log):
    kernel, made = Kernel(log), []

    def work():
        assert is_noting()
        made.append(torch.empty(1000, dtype=torch.int64).bool().any().item())  # an index that a kernel should write
        kernel[1,](torch.ones(8), 3, 32, BLOCK=64, num_warps=4)
        kernel[9,](torch.ones(5), 9, 16, BLOCK=64, num_warps=4)  # the same binary
        kernel[9,](torch.ones(5), 9, 16, BLOCK=32, num_warps=4)
        kernel[9,](torch.ones(5), 9, 17, BLOCK=32, num_warps=4)  # no multiple of 16
        kernel[9,](torch.ones(5), 9, 16, BLOCK=32, num_warps=8)

    compile_together(work, CPU)
    kinds = [("compiled", 64, 32), ("compiled", 32, 16), ("compiled", 32, 17), ("compiled", 32, 16)]
    assert sorted(entry for entry in log if entry[0] == "compiled") == sorted(kinds)
    assert sorted(entry for entry in log if entry[0] == "loaded") == [("loaded", 32)] * 3 + [("loaded", 64)]
    assert made == [False] and not is_noting()
    log.clear()
    kernel[1,](torch.ones(8), 3, 32, BLOCK=64)
    assert log == [("launched", 64, 32)]


def test_work_that_fails_leaves_its_kernels_compiled_and_nothing_else(log):
    kernel = Kernel(log)

    def work():
        kernel[1,](torch.ones(8), 3, 32, BLOCK=64)
        raise ValueError("this occurs again in the work itself")

    compile_together(work, CPU)
    assert ("compiled", 64, 32) in log and not is_noting()
    kernel[1,](torch.ones(8), 3, 32, BLOCK=64)
    assert log[-1] == ("launched", 64, 32)


def test_a_kernel_that_does_not_compile_leaves_the_others(log, monkeypatch):
    kernel, plain = Kernel(log), Kernel.run

    def run(self, *given, grid, warmup, **named):
        if named["BLOCK"] == 16:
            raise RuntimeError("no such block")
        return plain(self, *given, grid=grid, warmup=warmup, **named)

    monkeypatch.setattr(Kernel, "run", run)

    def work():
        kernel[1,](torch.ones(8), 3, 32, BLOCK=16)
        kernel[1,](torch.ones(8), 3, 32, BLOCK=64)

    compile_together(work, CPU)
    assert log == [("compiled", 64, 32), ("loaded", 64)]


def test_training_needs_the_same_kernels_for_rows_of_any_length(monkeypatch):
    """A length among the compile-time constants would compile a kernel anew in every step."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    from trimtab.models import layer_kernels

    asked = []

    class Noted:
        def __getitem__(self, grid):
            return lambda *given, **named: asked.append(named)

    for name in ("_rotate_and_store", "_add_norm", "_norm_backward", "_attend", "_gate", "_product"):
        monkeypatch.setattr(layer_kernels, name, Noted())
    for tokens in (300, 452):
        heads, wide = torch.zeros(tokens, 4, 16), torch.zeros(tokens, 64)
        starts, angles = torch.tensor([0, tokens]), torch.zeros(tokens, 16)
        layer_kernels.rotate(wide, wide[:, :32], angles, angles, None)
        layer_kernels.add_rms_norm(wide, wide, wide[0], 1e-6)
        layer_kernels.norm_backward(wide, None, wide, wide[0], 1e-6, learns=True)
        layer_kernels.attend_rows(heads, heads, heads, starts, starts, tokens, 1.0, None, learns=True)
        layer_kernels.gated(wide, wide)
        layer_kernels.product(wide, torch.zeros(4096, 64), None, torch.float32)
    half = len(asked) // 2
    assert half == 6 and asked[:half] == asked[half:]


@pytest.mark.parametrize("alone", [True, False], ids=["a function of its own", "part of the launcher"])
def test_threads_load_what_launches_a_kernel_one_after_another(alone, log):
    loading, together = [], []

    def load(source, metadata):
        loading.append(threading.get_ident())
        together.append(len(loading))
        time.sleep(0.01)
        loading.remove(threading.get_ident())
        return f"{source} {metadata}"

    from triton.runtime import build, driver

    owner, name = (build, "_load_module_from_path") if alone else (driver.active, "launcher_cls")
    setattr(owner, name, load)
    with one_loads_at_a_time(), ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda number: getattr(owner, name)("kernel", number), range(4)))
    assert found == [f"kernel {number}" for number in range(4)] and together == [1] * 4
    assert getattr(owner, name) is load
