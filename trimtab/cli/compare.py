"""`trimtab compare RUN_A RUN_B`: whether two runs are the same training on two devices or in two precisions.

Exit code 0: they agree; 1: they do not; 2: they cannot be compared.
"""

import json
import sys
from collections.abc import Sequence

from trimtab.cli.main import CommandParser, guarded
from trimtab.config.option import Limits
from trimtab.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    return guarded("trimtab compare", lambda: compare(sys.argv[1:] if argv is None else argv))


def compare(argv: Sequence[str]) -> int:
    from trimtab.report.judgement import (
        DRAWN_TOLERANCE,
        FIRST_TOLERANCE,
        LOG_PROB_TOLERANCE,
        TOLERANCE,
        judge,
        write_judgement,
    )
    from trimtab.report.run_data import read_run

    parser = CommandParser(
        "trimtab compare",
        "Judge whether two runs are the same training on two devices or in two precisions. Exit code 0: they agree; 1: "
        "they do not; 2: they cannot be compared.",
    )
    parser.add_argument("run_a", metavar="RUN_A", help="folder of the run to compare with: what its --save_path was")
    parser.add_argument("run_b", metavar="RUN_B", help="folder of the other run")
    parser.add_argument(
        "--tolerance", type=float, metavar="SHARE", default=TOLERANCE, help="largest weighted relative error"
    )
    parser.add_argument(
        "--first_tolerance",
        type=float,
        metavar="SHARE",
        help=f"largest relative error of the first step; unset: {FIRST_TOLERANCE:g} of a loss, in RL "
        f"{LOG_PROB_TOLERANCE:g} of the log-prob of recorded answers, {DRAWN_TOLERANCE:g} of the length of drawn ones",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="compare the first N steps only; unset: all")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument(
        "--output", metavar="PATH", help="file or folder of the page; unset: agreement.html in RUN_B's folder"
    )
    options = parser.parse_args(argv)
    for name, limits in (
        *((name, Limits(at_least=0, below=1)) for name in ("tolerance", "first_tolerance")),
        ("steps", Limits(at_least=1)),
    ):
        if complaint := limits.complaint(getattr(options, name)):
            raise UserError(f"--{name} {complaint}")
    judgement = judge(
        read_run(options.run_a),
        read_run(options.run_b),
        tolerance=options.tolerance,
        first_tolerance=options.first_tolerance,
        most=options.steps,
    )
    page = write_judgement(judgement, options.output)
    if options.json:
        print(json.dumps(judgement.as_dict() | {"page": str(page)}))
    else:
        print("\n".join([*judgement.lines(), f"page: {page}"]))
    return 0 if judgement.passes else 1


if __name__ == "__main__":
    raise SystemExit(main())
