"""A run's data, read once, live or finished; its sections in a file, a live page and a terminal."""
