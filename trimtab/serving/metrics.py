"""What a policy server counts, as a page that Prometheus reads."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator


class Metrics:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and HTTP status
        self.read = self.drawn = 0  # tokens of prompts and of answers
        self.seconds = 0.0  # in which the engine worked

    def count(self, path: str, status: int) -> None:
        self.requests[path, status] += 1

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began

    def page(self, *, waiting: int, sessions: int) -> str:
        lines = ["# TYPE trimtab_policy_requests_total counter"]
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'trimtab_policy_requests_total{{path="{path}",status="{status}"}} {count}')
        for name, kind, value in (
            ("prompt_tokens_total", "counter", self.read),
            ("drawn_tokens_total", "counter", self.drawn),
            ("engine_seconds_total", "counter", f"{self.seconds:.6f}"),
            ("waiting_requests", "gauge", waiting),
            ("sessions", "gauge", sessions),
        ):
            lines += [f"# TYPE trimtab_policy_{name} {kind}", f"trimtab_policy_{name} {value}"]
        return "\n".join(lines) + "\n"
