"""What a reward server counts, as a page that Prometheus reads."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator


class Metrics:
    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()  # by HTTP status
        self.samples = self.batches = self.waiting = 0
        self.seconds = 0.0

    @contextlib.contextmanager
    def batch(self, samples: int) -> Iterator[None]:
        """Count a batch and its time."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.batches += 1
            self.samples += samples
            self.seconds += time.monotonic() - began

    def page(self) -> str:
        by_status = sorted(self.requests.items())
        lines = [
            "# TYPE trimtab_reward_requests_total counter",
            *(f'trimtab_reward_requests_total{{status="{status}"}} {count}' for status, count in by_status),
            "# TYPE trimtab_reward_samples_total counter",
            f"trimtab_reward_samples_total {self.samples}",
            "# TYPE trimtab_reward_batches_total counter",
            f"trimtab_reward_batches_total {self.batches}",
            "# TYPE trimtab_reward_scoring_seconds_total counter",
            f"trimtab_reward_scoring_seconds_total {self.seconds:.6f}",
            "# TYPE trimtab_reward_waiting_samples gauge",
            f"trimtab_reward_waiting_samples {self.waiting}",
        ]
        return "\n".join(lines) + "\n"
