"""Commands. Ctrl-C while one is still being imported leaves without a traceback."""

import os
import sys
from types import TracebackType


def _leave_quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    print("trimtab: interrupted", file=sys.stderr, flush=True)
    os._exit(130)  # nothing has begun; Python's own way out would end in a signal


sys.excepthook = _leave_quietly
