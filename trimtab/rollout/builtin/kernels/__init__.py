"""Triton kernels for decoding. Import them only where Triton is installed."""
