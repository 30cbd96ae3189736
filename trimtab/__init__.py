"""Trimtab steers language models from feedback, from one CPU process to a cluster."""

__version__ = "0.1.0"
