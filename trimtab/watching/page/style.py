"""The look of a live page: the report's, and what a report does not have."""

from trimtab.report import style as report

STYLE = (
    report.STYLE
    + """
html { overflow-anchor: none; }
body { max-width: 74rem; padding-top: 2rem; }
a { color: var(--accent); }
nav { display: flex; flex-wrap: wrap; gap: 0 .8rem; margin-bottom: 1rem; font-size: .88rem; }
nav a { padding: .5rem 0; } nav a[hidden] { display: none; }
section:empty { display: none; }
.pill { display: inline-block; margin: -.6rem 0 1.4rem; padding: .25rem .8rem; border: 1px solid var(--rule);
        border-radius: 1rem; background: var(--card); color: var(--quiet); font-size: .88rem;
        font-variant-numeric: tabular-nums; }
.pill b { font-weight: 600; color: var(--ink); }
.pill b::before { content: ""; display: inline-block; width: .55rem; height: .55rem; border-radius: 50%;
                  margin-right: .45rem; background: var(--quiet); }
.pill.running b::before { background: var(--good); animation: breathe 2s ease-in-out infinite; }
.pill.starting b::before, .pill.silent b::before { background: var(--note); }
.pill.finished b::before { background: var(--accent); } .pill.stopped b::before { background: var(--bad); }
@keyframes breathe { 50% { opacity: .35; } }
@media (prefers-reduced-motion: reduce) { .pill.running b::before { animation: none; } }
.index { list-style: none; margin: 0; padding: 0; display: grid; gap: 1rem; }
.index h2 { margin: .8rem 0 .6rem; overflow-wrap: anywhere; } .index .pill { margin: 0 0 .8rem; }
.index .figures { margin-bottom: .9rem; } .index .words { max-width: none; }
.index h2 a { display: block; padding: .2rem 0; }
#controls { position: sticky; top: 0; z-index: 1; display: flex; flex-wrap: wrap; gap: .4rem 1.4rem;
            align-items: center; margin-top: 2.75rem; padding: .5rem 0; background: var(--paper);
            border-bottom: 1px solid var(--rule); font-size: .88rem; }
#controls[hidden] { display: none; }
#controls + section { scroll-margin-top: 3.5rem; } #controls + section h2 { margin-top: 1rem; }
.steps { display: flex; gap: .3rem; align-items: stretch; }
button, .steps input { font: inherit; color: var(--ink); background: var(--card); border: 1px solid var(--rule);
                       border-radius: 6px; padding: .3rem .7rem; min-height: 2.2rem; }
button { cursor: pointer; white-space: nowrap; } button:disabled { color: var(--quiet); opacity: .55; cursor: default; }
.steps input { width: 5rem; font-variant-numeric: tabular-nums; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.colours { border: 0; margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem; align-items: center;
           min-width: 0; }
.colours legend { float: left; color: var(--quiet); margin-right: .5rem; padding: 0; }
.colours label { cursor: pointer; } .colours input { position: absolute; opacity: 0; pointer-events: none; }
.colours label span { display: flex; align-items: center; min-height: 2.2rem; padding: 0 .7rem; border-radius: 6px;
                      border: 1px solid var(--rule); background: var(--card); }
.colours input:checked + span { border-color: var(--accent); color: var(--accent); font-weight: 600; }
.colours input:focus-visible + span { outline: 2px solid var(--accent); outline-offset: 2px; }
.legend { display: none; margin: 0; font-size: .78rem; font-family: var(--mono); gap: 2px; }
.legend span { padding: .1rem .4rem; border-radius: 3px; min-width: 1.6rem; text-align: center; }
[data-colour=log-prob] .legend.log-prob, [data-colour=advantage] .legend.advantage,
[data-colour=mask] .legend.mask { display: flex; flex-wrap: wrap; }
.group { padding-block: .7rem .8rem; margin-bottom: 1rem; }
section > .iteration h3 { font-size: .92rem; font-weight: 600; margin: 1.2rem 0 .5rem; }
.facts-line { color: var(--quiet); font-size: .82rem; margin: 0 0 .3rem; }
.asked:not(.answer) { margin: 0 0 .5rem; font-family: var(--mono); font-size: .84rem; white-space: pre-wrap;
                      overflow-wrap: anywhere; max-height: 12rem; overflow-y: auto; }
.group .words { margin: 0 0 .5rem; font-size: .88rem; }
.rollouts.beside { gap: .7rem; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); }
.answer { min-width: 0; }
.rollouts.beside article { height: 100%; margin: 0; background: var(--paper); }
.tokens pre { cursor: default; max-height: 24rem; }
.rollouts .tokens span { color: inherit; font-size: inherit; border-radius: 2px; }
.tokens span { box-decoration-break: clone; -webkit-box-decoration-break: clone; }
.tokens span:hover { outline: 1px solid var(--ink); }
.tokens i { color: var(--quiet); font-style: normal; font-size: .8em; opacity: .7; }
.rollouts .tokens .gap, .rollouts .tokens .world { color: var(--quiet); }
.tokens .turns:not(:has(.world)) li { border: 0; padding: 0; }
[data-colour=text] .tokens, body:not([data-colour=text]) .plain { display: none; }
"""
    + "".join(
        f"[data-colour=log-prob] :is(.tokens, .legend) .p{level} "
        f"{{ background: color-mix(in srgb, var(--line1) {share}%, transparent); }}\n"
        for level, share in enumerate((0, 10, 20, 32, 44, 58))
    )
    + "".join(
        f"[data-colour=advantage] :is(.tokens, .legend) .{kind}{level} "
        f"{{ background: color-mix(in srgb, var(--{colour}) {share}%, transparent); }}\n"
        for kind, colour in (("a", "line0"), ("b", "line1"))
        for level, share in enumerate((14, 28, 44), start=1)
    )
    + """
[data-colour=mask] :is(.tokens, .legend) .drawn:not(li) {
  background: color-mix(in srgb, var(--line2) 24%, transparent); }
[data-colour=mask] .legend .world { color: var(--quiet); border: 1px solid var(--rule); }
#pointed { position: fixed; inset: auto 0 0 0; margin: 0; padding: .5rem 1rem; background: var(--ink);
           color: var(--paper); font: .84rem/1.4 var(--mono); white-space: pre-wrap; overflow-wrap: anywhere;
           z-index: 2; pointer-events: none; }
#lost { position: fixed; inset: 0 0 auto 0; margin: 0; padding: .4rem 1rem; text-align: center; z-index: 3;
        background: var(--bad); color: var(--paper); font-size: .88rem; }
#pointed[hidden], #lost[hidden] { display: none; }
@media (max-width: 640px) {
  body { padding-top: 1rem; }
  #controls { position: static; }
  .steps { width: 100%; } .steps button { flex: 1 1 auto; padding-inline: .4rem; }
  .steps input { width: 4rem; min-width: 0; }
  button, .steps input, .colours label span { min-height: 2.75rem; }
  .colours label { flex: 1 1 auto; } .colours label span { justify-content: center; }
  .colours legend { float: none; width: 100%; }
  .rollouts.beside { display: flex; overflow-x: auto; scroll-snap-type: x proximity; padding-bottom: .4rem;
                     align-items: flex-start; }
  .beside .answer { flex: 0 0 82%; scroll-snap-align: start; }
  .beside .answer:only-child { flex-basis: 100%; }
}
"""
)
