"""The page's script: it takes over what has changed, in place, so that scroll position, open details, a selection and
coloured tokens stay; and it asks for other iterations' answers and for tokens.

Text of a model reaches it only inside HTML that the server has escaped, or through `textContent`.
"""

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
