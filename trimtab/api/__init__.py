"""Trimtab for callers in Python. `trimtab/__init__.py` says which of it is exported."""
