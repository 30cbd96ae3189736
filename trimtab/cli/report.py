"""`trimtab report RUN`: write a run's HTML page anew and print where it is."""

import sys
from collections.abc import Sequence

from trimtab.cli.run import guarded
from trimtab.cli.words import Words


def main(argv: Sequence[str] | None = None) -> int:
    return guarded("trimtab report", lambda: report(sys.argv[1:] if argv is None else argv))


def report(argv: Sequence[str]) -> None:
    words = Words("trimtab report", "Write the HTML report of a run from what it left in its folder.")
    words.add_argument("run", metavar="RUN", help="folder of the run: what --save_path was")
    options = words.parse_args(argv)

    from trimtab.report.page import write_report

    print(write_report(options.run))


if __name__ == "__main__":
    raise SystemExit(main())
