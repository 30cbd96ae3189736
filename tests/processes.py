"""Whether processes that tests have started are gone."""

import time
from pathlib import Path


def has_ended(pid: int, seconds: float = 5.0) -> bool:
    """Whether a process is gone within this time, or only waits for its parent to look."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False
