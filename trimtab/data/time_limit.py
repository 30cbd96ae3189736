"""A limit on the computing time of a chat template: it is a program that came with a model, and may never end."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from trimtab.errors import UserError

TEMPLATE_SECONDS = 10.0  # a rendering takes milliseconds


@contextlib.contextmanager
def template_time() -> Iterator[None]:
    """Ends what is inside with a UserError once this process has computed for so long. Signals reach main threads only,
    in which all renderings of data are made; elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _end)
    signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _end(_number: int, _frame: FrameType | None) -> None:
    raise UserError(f"the chat template was not done after {TEMPLATE_SECONDS:g} s of computing; use another one")
