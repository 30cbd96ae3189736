"""The report of a run as a live page."""
