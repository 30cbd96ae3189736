"""A stand-in for a training command: `python -m tests.distributed.crash RANK WHAT`. It imports nothing heavy."""

import os
import sys
import time


def main() -> None:
    rank, what = sys.argv[1:]
    if os.environ["RANK"] == rank:
        if what == "raise":
            raise ValueError("the worker's own words")
        if what == "kill":
            os.kill(os.getpid(), 9)
        if what == "refuse":
            print("trimtab sft: error: a mistake", file=sys.stderr)
            raise SystemExit(2)
        return
    if what != "finish":
        time.sleep(60)


if __name__ == "__main__":
    main()
