"""`trimtab plot curves | frontier | page MANIFEST`: figures of several runs that a manifest names."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from trimtab.cli.main import CommandParser, guarded
from trimtab.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    return guarded("trimtab plot", lambda: plot(sys.argv[1:] if argv is None else argv))


def plot(argv: Sequence[str]) -> None:
    parser = CommandParser(
        "trimtab plot", "Draw training curves over seeds, or the frontier between reward and risk, of several methods."
    )
    kinds = ("curves", "frontier", "page")
    parser.add_argument(
        "figure", metavar="|".join(kinds), choices=kinds, help="what to draw; page: an HTML page with a table and all"
    )
    parser.add_argument("manifest", metavar="MANIFEST", help="YAML or JSON file that lists the runs of each method")
    parser.add_argument(
        "--x",
        choices=("reward", "return", "kl"),
        default="return",
        help="frontier: what is good, or kl: how far a model has moved",
    )
    parser.add_argument("--y", choices=("bad", "cvar", "gcg"), default="bad", help="frontier: what is bad")
    parser.add_argument("--threshold", type=float, help="rewards below this are bad; unset: as the manifest says")
    parser.add_argument("--level", type=float, help="share of the rewards in CVaR; unset: as the manifest says")
    parser.add_argument("--output", metavar="FILE", help="a .png, .svg or .pdf; unset: beside the manifest, a PNG")
    options = parser.parse_args(argv)

    from trimtab.report.experiment import curves_figure, frontier_figure, read_manifest, save, write_experiment

    manifest = read_manifest(options.manifest)
    chosen = {name: getattr(options, name) for name in ("threshold", "level") if getattr(options, name) is not None}
    manifest = dataclasses.replace(manifest, **chosen)
    kind = f"frontier_{options.y}_{options.x}" if options.figure == "frontier" else options.figure
    ending = "html" if options.figure == "page" else "png"
    output = Path(options.output or manifest.path.with_name(f"{manifest.path.stem}_{kind}.{ending}")).expanduser()
    if options.figure == "page" and output.suffix != ".html":
        raise UserError(f"--output {output}: a page is HTML; give a file that ends in .html")
    if options.figure == "page":
        print(write_experiment(manifest, output))
    elif options.figure == "curves":
        print(save(curves_figure(manifest), output))
    else:
        print(save(frontier_figure(manifest, options.x, options.y), output))


if __name__ == "__main__":
    raise SystemExit(main())
