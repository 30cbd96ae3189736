"""What a run trained, as transformers has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.config.training_options import PretrainOptions
from trimtab.data.hub import trusting
from trimtab.errors import UserError
from trimtab.models.folder import ADAPTER
from trimtab.models.pretrained import from_pretrained
from trimtab.models.reward import AutoClassifier

if TYPE_CHECKING:
    from trimtab.api.run import Run


def load_model(run: Run, *, merged: bool = False, **arguments: Any) -> Any:
    import transformers

    _check_whole(run)
    options = _options(run)
    kind = AutoClassifier if run.job == "rm" else transformers.AutoModelForCausalLM
    arguments.setdefault("dtype", "auto")
    with trusting(options.trust_remote_code):
        if not (run.path / ADAPTER).is_file():
            return from_pretrained(kind, str(run.path), flag="run", **arguments)
        from peft import PeftModel

        base = from_pretrained(kind, options.pretrain, flag="the base model of the run", **arguments)
        model = PeftModel.from_pretrained(base, str(run.path))
        return model.merge_and_unload() if merged else model


def load_tokenizer(run: Run) -> Any:
    import transformers

    _check_whole(run)
    with trusting(_options(run).trust_remote_code):
        return from_pretrained(transformers.AutoTokenizer, str(run.path), flag="run")


def _options(run: Run) -> PretrainOptions:
    options: Any = run.options
    return options


def _check_whole(run: Run) -> None:
    if not run.finished:
        raise UserError(
            f"{run.path} has no whole model yet: the run is still going, or was stopped; "
            f"trimtab.open({str(run.path)!r}).resume() goes on"
        )
