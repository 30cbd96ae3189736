"""docs/async.md: its command runs and leaves what the page says, and what it names exists."""

import re

from tests.config.every_job import EVERY_JOB
from tests.docs.pages import DOCS, commands
from tests.train.rl.async_run import check_ledger
from tests.train.rl.rl_run import PROMPTS, write_task
from trimtab.cli.main import main
from trimtab.config.option import find
from trimtab.report.run_data import read_run

OF_BENCHMARKS = {"seeds", "picture"}


def test_the_command_of_the_page_leaves_a_ledger_and_a_time_line(tmp_path):
    ((program, *words),) = commands("async")
    assert program == "trimtab"
    write_task(tmp_path)
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [len(q) % 3 for q in queries]\n"
    )
    here = {"MODEL": "model", "prompts.jsonl": "prompts.jsonl", "reward.py": "reward.py"}
    words = [str(tmp_path / here[word]) if word in here else word for word in words]
    scaled = "--apply_chat_template --rollout_batch_size 4 --n_samples_per_prompt 2 --train_batch_size 8"
    places = f"--prompt_max_len 64 --generate_max_len 6 --save_path {tmp_path}/out --ckpt_path {tmp_path}/checkpoints"
    assert main([*words, *scaled.split(), *places.split()]) == 0
    check_ledger(tmp_path / "out", bound=4, places=PROMPTS)
    spans = read_run(tmp_path / "out").spans
    assert {span.lane for span in spans} == {"trainer", "engine 0", "rewards 0"}
    assert {span.iteration for span in spans if span.what == "update"} == {1, 2, 3}
    assert min(span.begin for span in spans) >= 0
    assert main(["report", str(tmp_path / "out")]) == 0
    assert "Who did what, and when" in (tmp_path / "out" / "report.html").read_text()


def test_every_option_the_page_names_exists_and_every_link_leads_somewhere():
    text = (DOCS / "async.md").read_text()
    named = set(re.findall(r"--(\w+)", text)) - OF_BENCHMARKS
    assert all(any(find(job, name) for job in EVERY_JOB) for name in named), named
    for target in re.findall(r"\]\(([\w/]+\.\w+)", text):
        assert (DOCS / target).is_file(), target
    for name in re.findall(r"(?:benchmarks|tests)/[\w/]+\.py", text):
        assert (DOCS.parent / name).is_file(), name
