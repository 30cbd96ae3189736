"""Tell models apart by their weights: by those in their safetensors files, or in memory where there are none.

The first begins with the word `files`, so that what was noted in one way is not compared with the other."""

import hashlib

from torch import nn

OF_FILES = "files-"
SAMPLE = 65_536  # elements hashed of each tensor: enough to tell models apart, little enough to be instant


def same_kind(first: str | None, second: str | None) -> bool:
    """Whether two fingerprints tell something of each other."""
    return (first or "").startswith(OF_FILES) == (second or "").startswith(OF_FILES)


def weights_fingerprint(model: nn.Module) -> str:
    """Hash of names, shapes and an even sample of the values."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        stride = max(1, flat.numel() // SAMPLE)
        values = flat[::stride][:SAMPLE].float().cpu().contiguous()
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()
