"""Environments of the project's own: --environment trimtab:NAME is NAME.py here, read like a user's own file."""
