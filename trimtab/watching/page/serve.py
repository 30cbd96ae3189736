"""The live page on this machine's loopback address."""

from collections.abc import Sequence
from pathlib import Path

from trimtab.errors import UserError


def serve_page(folders: Sequence[Path], *, port: int, every: float) -> None:
    """Serve until Ctrl-C. `port`: 0 for a free one; `every`: seconds between two looks at the files."""
    raise UserError("--page is not there yet: watch in the terminal, or write the page with trimtab report")
