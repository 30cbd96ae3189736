"""Seeds of requests: from one seed, a stream of its own for every prompt and every sample, whoever draws from it."""

_BITS = 2**64 - 1


def request_seed(seed: int, request: int) -> int:
    """The seed of one request among those that share a seed, from the request's number. As int64 holds it."""
    mixed = _mix((seed + _mix((request + 1) & _BITS)) & _BITS)
    return mixed - 2**64 if mixed >= 2**63 else mixed


def _mix(x: int) -> int:
    """The mixer of splitmix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _BITS
    return x ^ (x >> 31)
