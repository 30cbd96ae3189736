"""Style sheets of all pages, and the live page's script. No fonts, images or scripts are fetched from elsewhere."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fbfaf7; --card: #ffffff; --ink: #1f2328; --quiet: #656b73; --rule: #e5e2da; --wash: #f2f0ea;
  --accent: #1f5f8b; --good: #2f7d4f; --bad: #b3402f; --note: #8a6100;
  --line0: #1f5f8b; --line1: #c8553d; --line2: #2f7d4f; --line3: #7a4fa3; --line4: #a87400; --line5: #b03a78;
  --mono: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171b; --card: #1a1e23; --ink: #e4e6e8; --quiet: #9aa1a9; --rule: #2c3138; --wash: #20252b;
    --accent: #79b8e3; --good: #6fc48d; --bad: #f08b7c; --note: #d9b45b;
    --line0: #79b8e3; --line1: #ef8a70; --line2: #6fc48d; --line3: #b99be0; --line4: #d9b45b; --line5: #e78ab8;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 62rem; padding: 3rem 1.5rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
  -webkit-text-size-adjust: 100%;
}
h1 { font-size: 1.7rem; line-height: 1.25; font-weight: 650; letter-spacing: -.01em; margin: .2rem 0 .5rem;
     overflow-wrap: anywhere; text-wrap: balance; }
h2 { font-size: 1.05rem; font-weight: 650; margin: 2.75rem 0 .8rem; }
.eyebrow { color: var(--accent); font-size: .8rem; font-weight: 650; letter-spacing: .09em; text-transform: uppercase;
           margin: 0; }
.lead { color: var(--quiet); margin: 0 0 1.6rem; overflow-wrap: anywhere; }
.told { font-size: 1.12rem; margin: -.6rem 0 1.6rem; max-width: 46rem; overflow-wrap: anywhere; }
.figures { display: flex; flex-wrap: wrap; gap: 1px; margin: 0;
           background: var(--rule); border: 1px solid var(--rule); border-radius: 10px; overflow: hidden; }
.figures div { flex: 1 1 7.4rem; background: var(--card); padding: .85rem 1rem .8rem; }
.figures dt { color: var(--quiet); font-size: .78rem; line-height: 1.3; }
.figures dd { margin: .15rem 0 0; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums;
              white-space: nowrap; }
.figures dd + dd { font-size: .78rem; font-weight: 400; color: var(--quiet); line-height: 1.2; margin: 0; }
.findings { margin: 1.25rem 0 0; padding: .8rem 1.1rem; border-left: 3px solid var(--note); background: var(--wash);
            border-radius: 0 8px 8px 0; list-style: none; overflow-wrap: anywhere; }
.findings.calm { border-color: var(--good); color: var(--quiet); }
.findings li + li { margin-top: .4rem; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; }
.chart { margin: 0; padding: .9rem 1.1rem .7rem; background: var(--card); border: 1px solid var(--rule);
         border-radius: 10px; min-width: 0; flex: 1 1 calc(50% - .5rem); }
.chart.tall { flex-basis: 100%; }
.two .chart.tall { flex-basis: calc(50% - .5rem); }
figcaption { font-size: .88rem; display: flex; flex-wrap: wrap; gap: .1rem .9rem; align-items: center; }
figcaption b { font-weight: 600; }
.note { color: var(--quiet); font-size: .78rem; margin-left: auto; }
.c0 { --line: var(--line0); } .c1 { --line: var(--line1); } .c2 { --line: var(--line2); }
.c3 { --line: var(--line3); } .c4 { --line: var(--line4); } .c5 { --line: var(--line5); }
.key { color: var(--quiet); font-size: .78rem; display: inline-flex; align-items: center; gap: .4rem;
       overflow-wrap: anywhere; }
.key::before { content: ""; flex: none; width: 1rem; height: 0; border-top: 2px solid var(--line); }
.key.raw::before { opacity: .4; }
.key.dots::before { width: .5rem; height: .5rem; border: 0; border-radius: 50%; background: var(--line); }
.key.block::before { width: .7rem; height: .7rem; border: 0; border-radius: 2px; background: var(--line); opacity: .6; }
.key.level::before { border-top: 1.5px dashed var(--quiet); }
.plot { position: relative; height: 8.5rem; margin: .9rem .6rem 1.5rem 3rem; }
.tall .plot { height: 17rem; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.plot path { fill: none; stroke: var(--line); stroke-width: 1.75; stroke-linejoin: round; stroke-linecap: round;
             vector-effect: non-scaling-stroke; }
.plot path.raw { stroke-width: 1.1; stroke-opacity: .4; }
.plot path.smooth { stroke-width: 2.2; }
.plot path.dashed { stroke-dasharray: 6 5; }
.plot path.dots { stroke-width: 8; stroke-dasharray: none; }
.plot path.dots.small { stroke-width: 4; stroke-opacity: .6; }
.plot path.ring { stroke: var(--card); stroke-width: 11; }
.plot path.band { fill: var(--quiet); fill-opacity: .12; stroke: none; }
.plot path.band.spread { fill: var(--line); }
.plot path.mean { stroke-width: 1.5; stroke-linecap: butt; }
.plot path.whisker { stroke-width: 2; stroke-opacity: .55; stroke-linecap: butt; }
.plot .level { stroke: var(--quiet); stroke-width: 1.3; stroke-dasharray: 5 5; vector-effect: non-scaling-stroke; }
.phase { fill: var(--line); fill-opacity: .75; }
.plot path.phase { fill: var(--line); stroke: none; }
.lanes .plot { margin-left: 4.4rem; }
.phase.waits { fill: var(--quiet); fill-opacity: .22; }
.key.block.waits::before { background: var(--quiet); opacity: .35; }
.bar { fill: var(--line); fill-opacity: .45; }
.bar.weight { fill: var(--quiet); fill-opacity: .22; }
.grid { stroke: var(--rule); stroke-width: 1; vector-effect: non-scaling-stroke; }
.strips rect { fill: transparent; }
.strips rect:hover { fill: var(--ink); fill-opacity: .06; }
.y-labels span, .x-labels span { position: absolute; color: var(--quiet); font-size: .72rem; line-height: 1;
                                 font-variant-numeric: tabular-nums; white-space: nowrap; }
.y-labels span { right: calc(100% + .55rem); transform: translateY(-50%); }
.x-labels span { top: calc(100% + .55rem); transform: translateX(-50%); }
.nothing { color: var(--quiet); font-size: .88rem; margin: 1rem 0; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: .3rem 1.1rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th { text-align: left; font-weight: 500; color: var(--quiet); font-size: .78rem; }
td, th { padding: .5rem 1rem .5rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td:last-child, th:last-child { padding-right: 0; }
.samples td { font-family: var(--mono); font-size: .84rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.samples td, .samples th { min-width: 7rem; }
.samples th { overflow-wrap: anywhere; }
.samples .right { color: var(--good); } .samples .wrong { color: var(--bad); }
.right::before { content: "✓ "; } .wrong::before { content: "✗ "; }
.rollouts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 0 1rem; }
.rollouts div { min-width: 0; }
.rollouts h3 { font-size: .88rem; font-weight: 600; margin: .9rem 0 .5rem; }
.rollouts article { background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
                    padding: .6rem 1rem .7rem; margin-bottom: .6rem; break-inside: avoid; overflow-wrap: anywhere;
                    min-width: 0; }
.rollouts article p { margin: 0 0 .3rem; font-size: .9rem; } .rollouts span { color: var(--quiet); font-size: .78rem; }
.rollouts pre { margin: 0; font-family: var(--mono); font-size: .84rem; line-height: 1.45; white-space: pre-wrap;
                overflow-wrap: anywhere; max-height: 16rem; overflow-y: auto; }
.rollouts .prompt { color: var(--quiet); margin-bottom: .35rem; }
.turns { list-style: none; margin: 0; padding: 0; }
.turns li { margin: .3rem 0; padding: .1rem 0 .15rem .7rem; border-left: 3px solid var(--rule); }
.turns li.drawn { border-color: var(--accent); } .turns li.world pre { color: var(--quiet); }
.turns li.gap { color: var(--quiet); font-size: .78rem; font-style: italic; }
.rollouts .turns p { margin: 0; font-size: .78rem; color: var(--quiet); } .turns .drawn p { color: var(--accent); }
.turns b { color: var(--ink); }
.rollouts .counted { color: var(--quiet); font-size: .78rem; margin: .3rem 0 0; }
.browser fieldset { border: 0; margin: 0 0 .5rem; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem .9rem;
                    font-size: .88rem; }
.browser details { margin-top: 0; }
.browser legend { float: left; color: var(--quiet); margin-right: .9rem; }
.browser .prompt { padding-block: .8rem; margin-bottom: .8rem; }
.browser .prompt > pre { margin: 0 0 .4rem; font-family: var(--mono); font-size: .84rem; white-space: pre-wrap;
                         overflow-wrap: anywhere; max-height: 16rem; overflow-y: auto; }
.browser .rollouts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 15rem), 1fr)); margin-top: .3rem; }
.heat { fill: var(--line); }
.data { font-variant-numeric: tabular-nums; }
.data td, .data th { padding-block: .26rem; }
.data td:first-child { color: var(--quiet); }
.data td + td, .data th + th { text-align: right; overflow-wrap: break-word; }
.words { color: var(--quiet); margin: -.3rem 0 .8rem; max-width: 46rem; font-size: .95rem; overflow-wrap: anywhere; }
.words.flat { margin-top: .8rem; }
.words:empty { display: none; }
.wide { flex: 1 1 100%; margin: 0; }
.scroll { overflow-x: auto; padding-inline: 0; }
.scroll.padded { padding-inline: 1.1rem; }
.sides { border-collapse: separate; border-spacing: 0; }
.sides td + td, .sides th + th { text-align: left; white-space: nowrap; }
.sides th + th { white-space: normal; min-width: 7rem; max-width: 14rem; overflow-wrap: anywhere; }
.sides td:first-child, .sides th:first-child { position: sticky; left: 0; background: var(--card); padding-left: 1.1rem;
                                               min-width: 8rem; max-width: 10.5rem; overflow-wrap: break-word; }
.sides td:last-child, .sides th:last-child { padding-right: 1.1rem; }
.sides.phases td { white-space: nowrap; }
.sides td.best { font-weight: 650; } .sides td.best::after { content: " ●"; color: var(--good); font-size: .7em; }
.sides td.chosen, .sides td.default { white-space: normal; min-width: 7rem; max-width: 16rem; overflow-wrap: anywhere; }
.sides td.chosen { font-weight: 650; } .sides td.default { color: var(--quiet); }
.runs { list-style: none; margin: 0; padding: 0; }
.runs li { padding: .2rem 0; overflow-wrap: anywhere; } .runs span { color: var(--quiet); font-size: .88rem; }
.swatch { display: inline-block; width: 1rem; height: 0; border-top: 3px solid var(--line); margin-right: .45rem;
          vertical-align: middle; }
.swatch.dashed { border-top-style: dashed; }
.empty { color: var(--quiet); font-style: italic; }
.pairs { columns: 2; column-gap: 2.5rem; margin: .6rem 0; font-size: .86rem; }
.pairs div { display: flex; justify-content: space-between; gap: 1rem; padding: .26rem 0; break-inside: avoid;
             border-bottom: 1px solid var(--rule); }
.pairs dt { color: var(--quiet); flex: none; max-width: 60%; overflow-wrap: anywhere; }
.pairs dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; min-width: 0;
            white-space: pre-wrap; }
.facts { margin: .5rem 0; font-size: .9rem; }
.facts div { display: flex; gap: 1rem; padding: .22rem 0; }
.facts dt { flex: 0 0 7rem; color: var(--quiet); }
.facts dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
details { margin-top: .75rem; }
summary { cursor: pointer; font-size: .9rem; color: var(--accent); padding: .35rem 0; }
footer { margin-top: 3rem; color: var(--quiet); font-size: .78rem; overflow-wrap: anywhere; }
code { font-family: var(--mono); font-size: .9em; white-space: nowrap; }
@media (max-width: 640px) {
  body { padding: 1.5rem 1rem 3rem; }
  h1 { font-size: 1.35rem; }
  .figures div { flex-basis: 40%; }
  .chart, .two .chart.tall { padding: .8rem .8rem .5rem; flex-basis: 100%; }
  .tall .plot { height: 13rem; }
  .plot { margin-left: 2.6rem; }
  .note { margin-left: 0; }
  .pairs { columns: 1; }
  .facts dt { flex-basis: 5.4rem; }
  .samples thead { display: none; }
  .samples tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--rule); }
  .samples tr:last-child { border-bottom: 0; }
  .samples td { display: flex; gap: .75rem; border: 0; padding: .12rem 0; }
  .samples td::before { overflow-wrap: anywhere; }
  .samples td::before { content: attr(data-name); flex: 0 0 5.2rem; color: var(--quiet);
                        font-family: system-ui, sans-serif; font-size: .78rem; }
}
@media print {
  :root { --paper: #fff; --card: #fff; --ink: #000; --quiet: #555; --rule: #ccc; --wash: #fff; --accent: #1f5f8b;
          --good: #2f7d4f; --bad: #b3402f; --note: #8a6100;
          --line0: #1f5f8b; --line1: #c8553d; --line2: #2f7d4f; --line3: #7a4fa3; --line4: #a87400; --line5: #b03a78; }
  html { font-size: 12px; }
  body { padding: 0; font-size: 12px; max-width: none; }
  .chart, .card, .figures, tr { break-inside: avoid; }
  .rollouts pre { max-height: none; }
  h2, .words { break-after: avoid; }
  details::details-content { content-visibility: visible; height: auto; }
  .strips { display: none; }
}
"""


# ---- The live page: the report's style, and what a report does not have.


LIVE_STYLE = (
    STYLE
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


# ---- The live page's script. It replaces changed elements in place, so that scroll position, open details, a selection
# and coloured tokens stay. Text of a model reaches it only as escaped HTML or through `textContent`.


SCRIPT = r"""
"use strict";
const body = document.body, base = body.dataset.under;
const section = document.getElementById("answers"), controls = document.getElementById("controls");
const pointed = document.getElementById("pointed"), lost = document.getElementById("lost");
let seen = body.dataset.seen, source = null, pinned = null, newest = null;

// ---- what changes

function connect() {
  if (source) source.close();
  source = new EventSource(`${base}/events?seen=${seen}`);
  source.onopen = () => { lost.hidden = true; };
  source.onerror = () => {
    lost.hidden = false;
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 5000);
  };
  source.addEventListener("sections", (event) => {
    seen = event.lastEventId;
    steadily(() => { for (const [name, html] of Object.entries(JSON.parse(event.data))) take(name, html); });
  });
}

function take(name, html) {
  const place = document.getElementById(name);
  if (!place) return;
  const content = parsed(html);
  if (place === section) {
    newest = content.querySelector(".iteration")?.dataset.newest ?? null;
    if (pinned === null) children(place, content);
    steer();
  } else children(place, content);
  tick();
  ways();
}

// Links to what is there.
function ways() {
  for (const way of document.querySelectorAll("nav a[href^='#']"))
    way.hidden = !document.querySelector(way.hash)?.firstChild;
}

function parsed(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return document.importNode(template.content, true);
}

// What is read stays where it is, whatever grows above it.
function steadily(change) {
  const all = document.querySelectorAll("section > *, .charts > *, .group, .answer");
  let anchor = null, top = 0;
  if (window.scrollY > 0) for (const element of all) {
    const box = element.getBoundingClientRect();
    if (box.bottom > 0 && box.top < window.innerHeight) { anchor = element; top = box.top; if (box.top >= 0) break; }
  }
  change();
  if (anchor && anchor.isConnected) window.scrollBy(0, anchor.getBoundingClientRect().top - top);
}

function children(from, to) {
  const keyed = new Map();
  for (const child of from.children) if (child.dataset.key) keyed.set(child.dataset.key, child);
  let at = from.firstChild;
  for (const next of [...to.childNodes]) {
    const key = next.dataset?.key;
    const alike = at && at.nodeName === next.nodeName && !at.dataset?.key;
    const match = key ? keyed.get(key) : alike ? at : null;
    if (!match) { from.insertBefore(next, at); continue; }
    if (match === at) at = at.nextSibling; else from.insertBefore(match, at);
    if (match.nodeType !== Node.ELEMENT_NODE) {
      if (match.nodeValue !== next.nodeValue) match.nodeValue = next.nodeValue;
    } else if (!match.classList.contains("answer") && !match.isEqualNode(next)) {
      attributes(match, next);
      children(match, next);
    }
  }
  while (at) { const rest = at; at = at.nextSibling; rest.remove(); }
}

function attributes(from, to) {
  for (const { name, value } of to.attributes)
    if (name !== "open" && from.getAttribute(name) !== value) from.setAttribute(name, value);
  for (const { name } of [...from.attributes])
    if (name !== "open" && !to.hasAttribute(name)) from.removeAttribute(name);
}

function tick() {
  for (const time of document.querySelectorAll("time[data-since]")) {
    const seconds = Math.max(0, Math.round(Date.now() / 1000 - time.dataset.since));
    const [count, unit] = seconds < 60 ? [seconds, "s"] : seconds < 5400 ? [Math.round(seconds / 60), "min"]
      : seconds < 172800 ? [Math.round(seconds / 3600), "h"] : [Math.round(seconds / 86400), "days"];
    time.textContent = `${count} ${unit} ago`;
  }
}

// ---- answers of another iteration

function shown() { return section.querySelector(".iteration"); }

function steer() {
  const iteration = shown();
  controls.hidden = !iteration;
  if (!iteration) return;
  const box = controls.querySelector("input[type=number]");
  if (box !== document.activeElement) box.value = iteration.dataset.step;
  box.min = iteration.dataset.first;
  box.max = newest ?? iteration.dataset.newest;
  controls.querySelector("[data-go=earlier]").disabled = iteration.dataset.earlier === "";
  const last = pinned === null || iteration.dataset.step === newest;
  for (const name of ["later", "newest"]) controls.querySelector(`[data-go=${name}]`).disabled = last;
  controls.classList.toggle("following", pinned === null);
  colour();
}

async function show(step) {
  const reply = await fetch(`${base}/answers/${encodeURIComponent(step)}`);
  if (!reply.ok) return;
  const content = parsed(await reply.text());
  const iteration = content.querySelector(".iteration");
  if (!iteration) return;
  newest = iteration.dataset.newest;
  pinned = iteration.dataset.step === newest ? null : iteration.dataset.step;
  children(section, content);
  steer();
}

if (controls) {
  controls.addEventListener("click", (event) => {
    const go = event.target.dataset?.go;
    const data = shown()?.dataset;
    if (go && data) show(go === "newest" ? newest ?? data.newest : data[go] || newest);
  });
  controls.addEventListener("change", (event) => {
    if (event.target.type === "number" && event.target.value !== "") show(Math.max(0, Math.round(event.target.value)));
    if (event.target.name === "colour") { body.dataset.colour = event.target.value; colour(); }
  });
  body.dataset.colour = controls.querySelector("[name=colour]:checked").value;
  newest = shown()?.dataset.newest ?? null;
  steer();
}

// ---- tokens in colours

const inSight = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) { inSight.unobserve(entry.target); load(entry.target); }
}, { rootMargin: "300px" });

function colour() {
  if (body.dataset.colour === "text") return;
  for (const answer of section.querySelectorAll(".answer[data-answer]:not(.asked)")) inSight.observe(answer);
}

async function load(answer) {
  answer.classList.add("asked");
  const reply = await fetch(`${base}/tokens/${answer.dataset.step}/${answer.dataset.answer}`);
  const plain = answer.querySelector("article > pre:not(.prompt), article > ol.turns");
  if (!reply.ok || !plain) return;
  const tokens = document.createElement("div");
  tokens.className = "tokens";
  tokens.append(parsed(await reply.text()));
  plain.classList.add("plain");
  plain.after(tokens);
}

function point(event) {
  const token = event.target.closest?.(".tokens span");
  pointed.hidden = !token;
  if (!token) return;
  const [logProb, advantage] = (token.dataset.facts ?? "").split(" ");
  const facts = [];
  if (logProb) facts.push(`log-prob ${logProb} (${(100 * Math.exp(logProb)).toPrecision(3)} %)`);
  if (advantage) facts.push(`advantage ${advantage}`);
  if (token.classList.contains("world")) facts.push("read only, carries no loss");
  pointed.textContent = `${JSON.stringify(token.textContent.replace("\u21b5\n", "\n"))}  ${facts.join(", ")}`;
}
document.addEventListener("pointerover", point);
document.addEventListener("click", point);

document.addEventListener("visibilitychange", () => {
  if (document.hidden) { source?.close(); source = null; } else connect();
});
setInterval(tick, 1000);
tick();
ways();
if (!document.hidden) connect();
"""
