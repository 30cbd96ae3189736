"""Peak memory of log-probs through the chunked LM head against full logits: 8,192 tokens, 49,152 words, hidden 576.

Each side runs forward and backward in a process of its own; its peak is counted above what the process holds before.

    python benchmarks/lm_head_memory.py
"""

import multiprocessing
import resource
import threading
import time
from pathlib import Path

TOKENS, VOCABULARY, HIDDEN = 8192, 49_152, 576


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(kind: str, answer) -> None:
    import torch
    from torch import nn

    from trimtab.models.lm_head import token_log_probs

    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    targets = torch.randint(VOCABULARY, (TOKENS,))
    token_log_probs(hidden[:8], head, targets[:8])[0].sum().backward()  # warm up
    head.weight.grad = hidden.grad = None
    before, peak, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    if kind == "chunked":
        loss = -token_log_probs(hidden, head, targets)[0].mean()
    else:
        loss = nn.functional.cross_entropy(head(hidden), targets)
    loss.backward()
    seconds = time.monotonic() - began
    done.set()
    watcher.join()
    answer.put((loss.item(), (peak - before) / 2**30, seconds))


def main() -> None:
    context = multiprocessing.get_context("spawn")
    peaks = {}
    for kind in ("full logits", "chunked"):
        answer = context.Queue()
        process = context.Process(target=measure, args=(kind, answer))
        process.start()
        loss, peaks[kind], seconds = answer.get()
        process.join()
        print(f"{kind:12s} loss {loss:.6f}  peak {peaks[kind]:.3f} GiB  {seconds:.1f} s", flush=True)
    print(f"ratio: {peaks['chunked'] / peaks['full logits']:.3f} of the memory")


if __name__ == "__main__":
    main()
