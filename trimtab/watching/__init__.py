"""A run while it works, and after: in a terminal, and as a page. Only what a run writes is read."""
