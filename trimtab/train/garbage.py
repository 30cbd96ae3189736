"""What is there when training begins stays until its end. Python's collector of garbage would go through all of it now
and then, a million objects and some tenths of a second, where a run makes many small ones: episodes and their turns."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def what_is_there_stays() -> Iterator[None]:
    gc.collect()  # but for what is garbage already
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
