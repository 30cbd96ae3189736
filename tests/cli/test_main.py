import importlib
import resource
import subprocess
import sys

import pytest

from trimtab import __version__
from trimtab.cli import main as cli

HEAVY = ("torch", "transformers", "datasets", "peft", "numpy", "rich")


def test_every_verb_is_in_the_help(capsys, trimtab):
    assert cli.main([]) == 0
    bare = capsys.readouterr().out
    assert trimtab("--help").said == bare and all(f"  {verb} " in bare for verb in cli.VERBS)


def test_version(trimtab):
    assert trimtab("--version").said == f"trimtab {__version__}\n"


@pytest.mark.parametrize(
    "verb, hint",
    [
        ("stf", "did you mean trimtab sft?"),
        ("train_sft", "did you mean trimtab sft?"),
        ("train_dpo", "did you mean trimtab dpo?"),
        ("lora_combiner", "did you mean trimtab lora-combine?"),
        ("quickstrat", "did you mean trimtab quickstart?"),
        ("xyzzy", "the verbs are"),
    ],
)
def test_an_unknown_verb_is_one_line_and_exit_code_2(verb, hint, trimtab):
    done = trimtab(f"{verb} --bf16")
    assert done.code == 2 and done.err.count("\n") == 1
    assert done.err.startswith(f"trimtab: error: unknown verb {verb!r}; {hint}")


def test_a_verb_gets_the_rest_of_the_words(trimtab):
    assert trimtab("sft --learning_rat 1").mistake.startswith("unknown option --learning_rat;")


@pytest.mark.parametrize("verb", cli.VERBS)
def test_a_verbs_help_begins_with_its_usage(verb, capsys):
    try:
        assert cli.main([verb, "--help"]) == 0
    except SystemExit as leaving:  # argparse's own way, for the verbs of a few words
        assert leaving.code == 0
    assert capsys.readouterr().out.startswith(f"usage: trimtab {verb} ")


@pytest.mark.parametrize("name", ["sft", "rm", "prm", "dpo", "kto", "kd", "ppo", "grpo", "reinforce", "rloo", "rl"])
def test_every_training_job_has_a_verb_and_a_module_of_the_documents_name(name):
    assert cli.VERBS[name][0] == f"trimtab.cli.train_{name}"
    assert importlib.import_module(cli.VERBS[name][0]).main(["--max_len", "x"]) == 2


def test_help_and_mistakes_answer_at_once_and_import_nothing_heavy():
    script = (
        "import sys; from trimtab.cli.main import main\n"
        "codes = [main(['sft', '--help']), main(['sft', '--bff16']), main(['sft', '--dry_run', '--max_len', 'x']),"
        " main(['sft', '--dry_run']), main(['nonsense']), main(['dpo', '--help']), main(['lora-combine', '--help'])]\n"
        f"heavy = [name for name in {HEAVY} if name in sys.modules]\n"
        "print(codes, heavy)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[0, 2, 2, 2, 2, 0, 0] []", done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # of work, since the other core may be busy with tests
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_ctrl_c_while_modules_are_imported_leaves_without_a_traceback():
    script = (
        "import sys, builtins\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'trimtab.config.option':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from trimtab.cli.main import main\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "trimtab: interrupted\n")
