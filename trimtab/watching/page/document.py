"""The document that the sections are put into, with a style sheet and a script of this server's own."""

from __future__ import annotations

from html import escape

from trimtab import __version__
from trimtab.watching.page.boards import Board, IndexBoard, RunBoard

COLOURS = {"text": "nothing", "log-prob": "log-prob", "advantage": "advantage", "mask": "mask"}
JUMPS = {"curves": "curves", "answers": "answers", "time": "time", "pace": "speed", "configuration": "options"}
LEGENDS = {
    "log-prob": [("p0", "≥ 90 %"), ("p1", "≥ 60"), ("p2", "≥ 30"), ("p3", "≥ 10"), ("p4", "≥ 1"), ("p5", "&lt; 1 %")],
    "advantage": [("b3", "made rarer"), ("b2", ""), ("b1", ""), ("", "0"), ("a1", ""), ("a2", ""), ("a3", "likelier")],
    "mask": [("drawn", "drawn by the model, carries loss"), ("world", "read only")],
}


def document(title: str, board: Board, seen: str, *, under: str = "", home: bool = False) -> str:
    """The page as it is now, which is the version `seen`; `under`: where it asks for more; `home`: with a way back to
    the list of runs."""
    body = ""
    for name, html in board.since(0).items():
        section = f'<section id="{name}">{html}</section>\n'
        body += f"<div>{controls()}{section}</div>" if name == "answers" else section
    links = {"/": "all runs"} if home else {}
    links |= {f"#{name}": words for name, words in JUMPS.items() if name in board.sections}
    ways = "".join(f"<a href='{place}'>{words}</a>" for place, words in links.items())
    back = f"<nav>{ways}</nav>" if ways else ""
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n"
        '<link rel=icon href="data:,">\n'
        "<link rel=stylesheet href='/page.css'>\n<script src='/page.js' defer></script>\n</head>\n"
        f'<body data-under="{escape(under)}" data-seen="{escape(seen)}">\n{back}{body}'
        "<noscript><p class=words>Without its script this page is as it was when it was loaded.</p></noscript>"
        f"<p id=lost hidden>The page's server has ended; what is shown stays as it was.</p>"
        f"<p id=pointed hidden></p>"
        f"<footer>trimtab {escape(__version__)}; read from the run's folder, on this machine.</footer>\n"
        "</body>\n</html>\n"
    )


def run_page(board: RunBoard, seen: str, number: int, several: bool) -> str:
    return document(board.name, board, seen, under=f"/run/{number}", home=several)


def index_page(board: IndexBoard, seen: str) -> str:
    return document(f"{len(board.runs)} runs", board, seen)


def controls() -> str:
    """Which iteration's answers are shown, and what colours their tokens."""
    radios = "".join(
        f'<label><input type=radio name=colour value="{value}"{" checked" if value == "text" else ""}>'
        f"<span>{words}</span></label>"
        for value, words in COLOURS.items()
    )
    legends = ""
    for name, keys in LEGENDS.items():
        spans = "".join(f'<span class="{kind}">{words}</span>' for kind, words in keys)
        legends += f'<p class="legend {name}">{spans}</p>'
    return (
        "<div id=controls hidden><div class=steps role=group aria-label='which iteration'>"
        "<button type=button data-go=earlier>‹ earlier</button>"
        "<input type=number inputmode=numeric aria-label=iteration>"
        "<button type=button data-go=later>later ›</button><button type=button data-go=newest>newest</button></div>"
        f"<fieldset class=colours><legend>colour tokens by</legend>{radios}</fieldset>{legends}</div>"
    )
