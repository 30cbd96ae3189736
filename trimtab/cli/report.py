"""`trimtab report RUN ...`: write the HTML page of a run, or of several side by side, and print where it is."""

import sys
from collections.abc import Sequence
from pathlib import Path

from trimtab.cli.main import CommandParser, guarded


def main(argv: Sequence[str] | None = None) -> int:
    return guarded("trimtab report", lambda: report(sys.argv[1:] if argv is None else argv))


def report(argv: Sequence[str]) -> None:
    parser = CommandParser(
        "trimtab report", "Write the HTML report of a run, or of several side by side, from what they left behind."
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run: what --save_path was")
    parser.add_argument(
        "--output",
        metavar="PATH",
        help="file or folder to write to; unset: report.html in the run's folder, or for several runs "
        "comparison.html in the first one's",
    )
    options = parser.parse_args(argv)

    from trimtab.report.comparison import write_comparison
    from trimtab.report.page import write_report

    # What a shell makes of runs/* may hold files as well, such as those of an attack.
    runs = [run for run in options.runs if not Path(run).is_file()] or options.runs
    if len(runs) == 1:
        print(write_report(runs[0], options.output))
    else:
        print(write_comparison(runs, options.output))


if __name__ == "__main__":
    raise SystemExit(main())
