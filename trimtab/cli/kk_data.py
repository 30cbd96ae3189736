"""`trimtab kk-data ROWS FILE.jsonl`: knights-and-knaves puzzles as prompts and solutions to train on."""

from collections.abc import Sequence
from pathlib import Path

from trimtab.cli.main import CommandParser, command_main
from trimtab.errors import UserError


def kk_data(argv: Sequence[str]) -> None:
    parser = CommandParser(
        "trimtab kk-data",
        "Turn knights-and-knaves puzzles into src/tgt rows with the prompt of PaddleNLP's guide.",
    )
    parser.add_argument(
        "rows", metavar="ROWS", help="puzzles: a parquet or JSONL file, a folder or a hub name; or several"
    )
    parser.add_argument("file", metavar="FILE.jsonl", help="where the rows go; what is there is replaced")
    parser.add_argument("--split", default="train", help="which split of ROWS, where there are several")
    parser.add_argument("--max_samples", type=int, help="only so many rows, the first; unset: all")
    options = parser.parse_args(argv)
    if Path(options.file).suffix != ".jsonl":
        raise UserError(f"{options.file}: the rows are JSON lines; give a file that ends in .jsonl")
    if options.max_samples is not None and options.max_samples < 1:
        raise UserError(f"--max_samples {options.max_samples}: give at least 1")

    from trimtab.data.conversion import convert

    path = Path(options.file).expanduser()
    count = convert(options.rows, path, split=options.split, max_samples=options.max_samples)
    print(f"{count:,} puzzles in {path}")


main = command_main("kk-data", kk_data)

if __name__ == "__main__":
    raise SystemExit(main())
