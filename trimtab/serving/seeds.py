"""From which stream a request draws. Clients send one seed for all conversations and turns, so it is made of where the
turn stands as well: asked again, it is the same answer."""

import hashlib


def stream_seed(seed: int, session: str | None, length: int) -> int:
    """`length`: tokens that stand before the turn. As int64 holds it."""
    name = f"{seed}/{'' if session is None else session}/{length}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)
