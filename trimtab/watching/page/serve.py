"""The live page on this machine's loopback address."""

from collections.abc import Sequence
from pathlib import Path

from trimtab.errors import UserError

try:
    from trimtab.server.http import address, bind, make_server, run_until_signal
    from trimtab.watching.page.app import make_app
except ImportError as error:
    raise UserError(f"--page needs the package {error.name}: pip install 'trimtab[serve]'") from error

DRAIN_SECONDS = 2.0


def serve_page(folders: Sequence[Path], *, port: int, every: float) -> None:
    """Serve until Ctrl-C. `port`: 0 for a free one; `every`: seconds between two looks at the files."""
    try:
        listening = bind("127.0.0.1", port)
    except UserError as error:
        raise UserError(f"--port {port}: somebody listens there, or you may not; choose another, or 0") from error
    server = make_server(make_app(folders, every), DRAIN_SECONDS)
    what = str(folders[0]) if len(folders) == 1 else f"{len(folders)} runs"
    print(f"{what} at {address(listening)} (Ctrl-C ends it)", flush=True)
    run_until_signal(server, listening)
