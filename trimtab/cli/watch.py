"""`trimtab watch RUN ...`: look at runs while they work, or after, in this terminal or as a page."""

import sys
from collections.abc import Sequence

from trimtab.cli.main import CommandParser, guarded
from trimtab.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    return guarded("trimtab watch", lambda: watch(sys.argv[1:] if argv is None else argv))


def watch(argv: Sequence[str]) -> None:
    parser = CommandParser(
        "trimtab watch",
        "Look at runs while they work, or after. Only what a run writes is read, so nothing is slowed or changed.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run: what --save_path is")
    parser.add_argument("--once", action="store_true", help="print how things stand and leave, as without a terminal")
    parser.add_argument(
        "--every", metavar="SECONDS", type=float, default=2.0, help="time between two looks at the files"
    )
    parser.add_argument("--wait", action="store_true", help="wait for runs whose folder is not there yet")
    parser.add_argument("--page", action="store_true", help="serve the report as a live page on this machine")
    parser.add_argument("--port", type=int, default=0, help="port of --page on 127.0.0.1; 0: a free one")
    options = parser.parse_args(argv)
    if not 0.1 <= options.every <= 3600:
        raise UserError(f"--every {options.every:g}: give seconds between 0.1 and 3600")
    if not 0 <= options.port <= 65535:
        raise UserError(f"--port {options.port}: give a port between 1 and 65535, or 0 for a free one")
    if options.page and options.once:
        raise UserError("--page and --once: a page that is written once is what trimtab report makes")
    if options.port and not options.page:
        raise UserError("--port has no meaning without --page")

    from trimtab.report.run_state import watched_folders

    folders = watched_folders(options.runs, wait=options.wait)
    if options.page:
        try:
            from trimtab.report.live_page import serve_page
        except ImportError as error:
            raise UserError(f"--page needs the package {error.name}: pip install 'trimtab[serve]'") from error

        serve_page(folders, port=options.port, every=options.every)
        return
    from trimtab.report.terminal import watch_in_terminal

    watch_in_terminal(folders, every=options.every, once=options.once, wait=options.wait)


if __name__ == "__main__":
    raise SystemExit(main())
