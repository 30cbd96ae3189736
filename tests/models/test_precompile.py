"""Kernels compiled ahead of a pass."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

from trimtab.rollout.builtin.fused_layers import one_loads_at_a_time


def test_threads_load_what_launches_a_kernel_one_after_another(monkeypatch):
    loading, together = [], []

    def load(source, metadata):
        loading.append(threading.get_ident())
        together.append(len(loading))
        time.sleep(0.01)
        loading.remove(threading.get_ident())
        return f"{source} {metadata}"

    runtime = ModuleType("triton.runtime")
    runtime.driver = SimpleNamespace(active=SimpleNamespace(launcher_cls=load))
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    with one_loads_at_a_time(), ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda number: runtime.driver.active.launcher_cls("kernel", number), range(4)))
    assert found == [f"kernel {number}" for number in range(4)] and together == [1] * 4
    assert runtime.driver.active.launcher_cls is load
