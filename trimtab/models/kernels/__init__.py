"""Triton kernels of training and scoring. Import them only where Triton is installed."""
