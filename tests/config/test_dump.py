import pytest
import yaml

from tests.config.every_job import EVERY_JOB
from trimtab.config.jobs import PRMOptions, SFTOptions
from trimtab.config.parser import parse
from trimtab.config.resolved_config import redact, settled_and_checked, to_dict, to_yaml
from trimtab.config.rl_jobs import PPOOptions

KEY = "0123456789abcdef0123456789abcdef01234567"


def read_back(tmp_path, text: str, *argv: str, job_class: type = SFTOptions):
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return parse(job_class, ["--config", str(path), *argv])


@pytest.mark.parametrize(
    "options",
    [
        SFTOptions(),
        SFTOptions(learning_rate=1.23456789e-7, adam_betas=(0.1, 0.2), l2=1e22, target_modules=("a", "b")),
        SFTOptions(
            input_template="é: {}\n\t\"q\" 'p' \\n # no\n", output_key="true", wandb_group="12", wandb_org="1e3"
        ),
        SFTOptions(input_template=None, use_wandb="offline", bf16=True, train_max_tokens_per_gpu=5, dataset="a, b:c"),
        SFTOptions(
            use_wandb="True", tokenizer_chat_template="{% for m in messages %}\n{{ m }}\n{% endfor %}", input_key=""
        ),
    ],
)
def test_a_written_config_reads_back_equal(options, tmp_path):
    assert read_back(tmp_path, to_yaml(options)) == options


@pytest.mark.parametrize(
    "options", [*(job_class() for job_class in EVERY_JOB), PRMOptions(placeholder_token="ки", reward_tokens=("+", "-"))]
)
def test_the_config_of_every_job_reads_back_equal(options, tmp_path):
    assert read_back(tmp_path, to_yaml(options), job_class=type(options)) == options


@pytest.mark.parametrize("job_class", EVERY_JOB)
def test_in_a_written_config_only_what_is_not_a_default_counts_as_given(job_class, tmp_path):
    assert read_back(tmp_path, to_yaml(job_class()), job_class=job_class).given == {"config"}


@pytest.mark.parametrize("changes", [{"use_dynamic_batch": True}, {"enable_vllm_is_correction": True}])
def test_what_a_run_has_filled_in_is_not_a_wish_of_its_config(tmp_path, changes):
    places = {"pretrain": "owner/model", "prompt_data": "owner/data", "reward_pretrain": "owner/rm"}
    options, warnings = settled_and_checked(PPOOptions(**places, **changes))
    (tmp_path / "options.yaml").write_text(to_yaml(options))
    again, warnings_again = settled_and_checked(parse(PPOOptions, ["--config", str(tmp_path / "options.yaml")]))
    assert again == options and warnings_again == warnings
    assert changes.keys() <= again.given


def test_what_concerns_one_call_only_is_not_written():
    written = yaml.safe_load(to_yaml(SFTOptions(dry_run=True, config="x.yaml", local_rank=3)))
    assert not {"dry_run", "config", "local_rank"} & written.keys()
    assert written == to_dict(SFTOptions())


def test_a_key_is_in_no_text_that_options_become(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    options = SFTOptions(use_wandb=KEY)
    for text in (
        to_yaml(options),
        str(to_dict(options)),
        repr(options),
        redact(f"bad key {KEY}, hf_abcdefgh", options),
    ):
        assert KEY not in text and "hf_abcdefgh" not in text
    assert redact("no secret here", options) == "no secret here"


@pytest.mark.parametrize("value", ["True", "offline", "online", None])
def test_a_harmless_value_is_written_as_it_is(value):
    assert to_dict(SFTOptions(use_wandb=value))["use_wandb"] == value
    assert redact("True offline online", SFTOptions(use_wandb=value)) == "True offline online"


def test_columns_named_key_and_token_options_are_not_hidden():
    assert to_dict(SFTOptions(input_key="question"))["input_key"] == "question"


def test_a_config_whose_key_was_not_written_takes_it_from_the_environment_or_the_command_line(tmp_path):
    text = to_yaml(SFTOptions(use_wandb=KEY))
    assert read_back(tmp_path, text) == SFTOptions(use_wandb="True")
    assert read_back(tmp_path, text, "--use_wandb", KEY) == SFTOptions(use_wandb=KEY)
    assert read_back(tmp_path, text, "--use_wandb", "None") == SFTOptions()


ADDRESSES = {
    "http://user:hunter2@host:5000/get_reward": "http://host:5000/get_reward",
    "http://token-of-mine@host/": "http://host/",
    "https://host/score?api_key=abcdefg&model=small": "https://host/score?model=small",
    "https://host/score?x=0123456789abcdef0123456789": "https://host/score",
    "http://host/score?model=small": "http://host/score?model=small",
    "reward.py": "reward.py",
    "reward.py,http://user:hunter2@host/a": "reward.py,http://host/a",
}


@pytest.mark.parametrize("address, expected", ADDRESSES.items())
def test_an_address_is_written_without_its_credentials(address, expected):
    options = PPOOptions(remote_rm_url=address)
    assert to_dict(options)["remote_rm_url"] == expected
    for word in ("hunter2", "token-of-mine", "abcdefg", "0123456789abcdef0123456789"):
        assert word not in to_yaml(options) + repr(options) + redact(f"cannot reach {address}", options)
