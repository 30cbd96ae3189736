"""The pages in a real browser: nothing sticks out on a phone, nothing is fetched, nothing complains, dark is dark.

Skipped where no Chromium is installed.
"""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest

from tests.report.live_runs import EVIL, rl_run, served
from tests.report.pages import FIGURES, write_episode_run, write_rl_run, write_run
from trimtab.report.comparison import write_comparison
from trimtab.report.page import write_report

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

PHONE, SCREEN = 380, 1100
CONTROL = "<!doctype html><div style='width:500px'>wide</div><img src='http://127.0.0.1:9/a.png'>"
"""A page that does what reports must not, to see that the test would notice."""

# One browser measures every page in frames of its own, with everything that can be unfolded open.
MEASURE = """
<script>
addEventListener("load", () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, width = frame.contentWindow.innerWidth;
    for (const details of page.querySelectorAll("details")) details.open = true;
    const outside = [...page.querySelectorAll("body *")].filter(
      part => part.getBoundingClientRect().right > width + 1 && !part.closest(".scroll"));
    found[frame.title] = {
      width: width,
      needed: page.documentElement.scrollWidth,
      outside: outside.map(part => part.outerHTML.slice(0, 80)),
      fetched: frame.contentWindow.performance.getEntriesByType("resource").map(entry => entry.name),
      curves: page.querySelectorAll("svg path").length,
      labels: Math.min(...[...page.querySelectorAll(".sides td:first-child")].map(
        cell => cell.getBoundingClientRect().width), 1e6),
    };
  }
  document.body.textContent = JSON.stringify(found);
});
</script>
"""


def chromium(profile: Path, *words: str) -> subprocess.CompletedProcess:
    quiet = "--disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"
    return subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", *quiet.split(), "--disable-sync", "--hide-scrollbars"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}", "--enable-logging=stderr", *words),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    runs = {job: write_run(folder / job, job) for job in FIGURES}
    long_name = "a_run_with_a_name_longer_than_a_telephone_is_wide_" * 2
    runs["long"] = write_run(folder / long_name, "dpo", dataset=f"data/{long_name}.jsonl", input_template="x" * 300)
    (runs["long"] / "samples.json").write_text(json.dumps([{"prompt": "y" * 300, "before": "", "after": "z" * 300}]))
    runs["ppo"] = write_rl_run(folder / "ppo", "ppo", generate_max_len=10)
    rollout = {"step": 50, "prompt": "y" * 300, "response": f"{'z' * 300}\n" * 40, "reward": -1.0, "label": "x" * 300}
    rollout |= {"row": 1, "kept": "best", "group": "evaluation", "parts": {"p" * 200: 1.0, "q": 2.0}}
    with (runs["ppo"] / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps(rollout) + "\n")
    runs["episodes"] = write_episode_run(folder / "episodes")
    turns = [{"role": "r" * 90, "text": "w" * 400, "tokens": 9, "drawn": False}] * 2
    with (runs["episodes"] / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps(rollout | {"turns": turns, "problem": "p" * 300, "environment": {"e" * 99: 1}}) + "\n")
    written = {name: write_report(run) for name, run in runs.items()}
    compared = [
        runs["dpo"],
        runs["long"],
        *(write_run(folder / f"run{index}", "dpo", beta=index) for index in range(4)),
    ]
    rl_runs = [runs["ppo"], write_rl_run(folder / long_name / "grpo"), runs["sft"]]
    return written | {"comparison": write_comparison(compared), "RL comparison": write_comparison(rl_runs)}


@pytest.fixture(scope="module")
def measured(pages, tmp_path_factory) -> tuple[dict[str, dict], list[str]]:
    """What the browser found of each page at each width, and what it wrote to its console."""
    folder = tmp_path_factory.mktemp("browser")
    texts = {name: path.read_text() for name, path in pages.items()} | {"control": CONTROL}
    frames = "".join(
        f'<iframe title="{name} {width}" width={width} height=900 style="border:0" srcdoc="{escape(text)}"></iframe>'
        for name, text in texts.items()
        for width in (PHONE, SCREEN)
    )
    (folder / "all.html").write_text(f"<!doctype html><meta charset=utf-8><body>{frames}{MEASURE}")
    ran = chromium(folder / "profile", "--dump-dom", (folder / "all.html").as_uri())
    (found,) = re.findall(r"<body>(.*)</body>", ran.stdout, re.DOTALL)
    return json.loads(unescape(found)), [line for line in ran.stderr.splitlines() if "CONSOLE" in line]


def test_the_measurement_notices_what_is_too_wide_and_what_is_fetched(measured):
    control = measured[0][f"control {PHONE}"]
    assert control["width"] == PHONE and control["needed"] > PHONE and control["outside"]
    assert control["fetched"] == ["http://127.0.0.1:9/a.png"]


@pytest.mark.parametrize("width", [PHONE, SCREEN])
def test_no_page_is_wider_than_its_window(measured, pages, width):
    for name in pages:
        found = measured[0][f"{name} {width}"]
        assert found["width"] == width and found["curves"] > 5
        assert (found["needed"], found["outside"]) == (width, []), name


def test_no_page_fetches_anything_or_complains(measured, pages):
    for name in pages:
        assert measured[0][f"{name} {PHONE}"]["fetched"] == [], name
    # The control's picture cannot be loaded, and the console says so; no other line may be there.
    assert [line for line in measured[1] if "127.0.0.1:9" not in line and "ERR_" not in line] == []


@pytest.mark.parametrize(("scheme", "darkest", "lightest"), [("light", 225, 255), ("dark", 15, 60)])
def test_a_page_follows_the_light_of_the_system(pages, tmp_path, scheme, darkest, lightest):
    import matplotlib.image

    picture = tmp_path / "page.png"
    dark = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    size = f"--window-size={PHONE},900"
    chromium(tmp_path / "profile", *dark, size, f"--screenshot={picture}", pages["rm"].as_uri())
    pixels = 255 * matplotlib.image.imread(picture)[:, :, :3]
    assert pixels.shape[1] == PHONE
    assert darkest < pixels.mean() < lightest and pixels.std() > 5, "neither blank nor of the other kind"


@pytest.mark.parametrize("width", [PHONE, SCREEN])
def test_labels_of_a_comparison_of_many_runs_stay_words(measured, width):
    for name in ("comparison", "RL comparison"):
        assert 120 <= measured[0][f"{name} {width}"]["labels"] < 1e6, "not a letter a line"


def test_a_filter_of_answers_hides_the_others_without_a_script(pages, tmp_path):
    page = pages["ppo"].read_text()
    assert "<script" not in page
    ticked = page.replace('id="row-evaluation1"', 'id="row-evaluation1" checked')
    shown = "[...document.querySelectorAll('.browser .prompt')].map(p => p.checkVisibility()).join()"
    look = f"<script>document.title = {shown}</script>"
    (tmp_path / "ticked.html").write_text(ticked + look)
    seen = chromium(tmp_path / "profile", "--dump-dom", (tmp_path / "ticked.html").as_uri()).stdout
    assert "<title>true,false</title>" in seen


def test_the_script_runs_and_what_a_model_wrote_does_not(tmp_path):
    with served(rl_run(tmp_path / "grpo", response=EVIL)) as client:
        alone = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
        found = chromium(tmp_path / "profile", alone, "--dump-dom", f"{client.base_url}/run/1")
    page = found.stdout
    assert " ago</time>" in page and '<div id="controls" class="following">' in page
    assert page.count("<script") == 1 and "<img" not in page and "alert(1)" in page
    complaints = [line for line in found.stderr.splitlines() if "CONSOLE" in line]
    assert complaints == [], complaints
