"""Trimtab steers language models from feedback, on one CPU or several GPUs."""

__version__ = "0.1.0"
