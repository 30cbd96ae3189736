"""What tiles and launches must know of where kernels run."""

import functools

import triton


@triton.jit
def _nothing():
    pass


INTERPRETED = not isinstance(_nothing, triton.JITFunction)


@functools.cache
def shared_memory() -> int:
    """Bytes that one program may have."""
    if INTERPRETED:
        return 2**30
    driver = triton.runtime.driver.active
    return driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"]
