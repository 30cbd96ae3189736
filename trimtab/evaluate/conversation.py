"""A conversation with a model: what was said so far, and the next answer, shown while it is written.

A tokenizer's chat template is used where it is asked for, and also where nothing was asked for. Without one a turn goes
into --input_template, and the turns follow each other as text.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.config.jobs import ChatOptions
from trimtab.data.chat import ChatRenderer, in_template
from trimtab.data.formats import Message
from trimtab.data.post_processing import conditioned
from trimtab.distributed.device import find_device
from trimtab.distributed.random_state import seed_everything
from trimtab.errors import UserError
from trimtab.evaluate.generation import load_job_tokenizer, sampling_of
from trimtab.models.load import load_frozen_policy
from trimtab.rollout.factory import build_engine
from trimtab.rollout.sampling import request_seed, stop_tokens
from trimtab.rollout.trajectory import Finish

SHOWN_AT_ONCE = 8  # tokens

Show = Callable[[str], None]


class Conversation:
    def __init__(self, options: ChatOptions):
        self.options, self.tokenizer = options, load_job_tokenizer(options)
        seed_everything(options.seed, deterministic=options.full_determinism)
        policy = load_frozen_policy(options.pretrain, options, find_device(), flag="--pretrain").model
        self.engine = build_engine(policy, self.tokenizer, max_num_seqs=1, prefix_caching=True)
        unasked = "input_template" not in options.given
        self.as_chat = options.apply_chat_template or bool(unasked and self.tokenizer.chat_template)
        self._chat = ChatRenderer(self.tokenizer) if self.as_chat else None
        context = self.engine.context
        self.most_tokens = options.max_len if context is None else min(options.max_len, context)
        self._stops = stop_tokens(policy, self.tokenizer)
        self._preamble = Path(options.ta_prompt).expanduser().read_text() if options.ta_prompt else ""
        self._answers = 0
        self.clear()

    def clear(self) -> None:
        """Forget what was said."""
        self.text = self._preamble
        self.turns: list[Message] = []
        if self._preamble:
            self.turns.append({"role": "system", "content": self._preamble.strip()})

    def ask(self, words: str, show: Show) -> Finish:
        """Answer these words; `show` gets the answer in pieces. Ctrl-C ends it where it is ("abort")."""
        ids = self.tokenizer(self._prompt(words), add_special_tokens=False)["input_ids"]
        room = self.most_tokens - len(ids)
        if room < 1:
            raise UserError(
                f"the conversation has {len(ids)} tokens with these words, and {self.most_tokens} is the most: /clear "
                "begins a new one"
            )
        answer = _Answer(self.tokenizer, show)
        sampling = sampling_of(self.options, max_new_tokens=room, stop_token_ids=self._stops)
        seed = request_seed(self.options.seed, self._answers)
        finish: Finish = "abort"
        try:
            with self.engine.session(sampling) as session:
                request = session.add(ids, seed=seed)
                while session.has_unfinished:
                    for rollout in session.step(SHOWN_AT_ONCE):
                        answer.grow(rollout.ids, last=True)
                        finish = rollout.finish_reason
                    answer.grow(session.output_ids(request))
        except KeyboardInterrupt:
            pass
        self._answers += 1
        self._remember(words, answer.text)
        return finish

    def _prompt(self, words: str) -> str:
        condition = self.options.condition
        if self._chat is not None:
            turns = [*self.turns, {"role": "user", "content": words}]
            return self._chat.render_prompt(conditioned(turns, condition), where="the conversation")
        return conditioned(self._continued(words), condition)

    def _continued(self, words: str) -> str:
        before = f"{self.text}\n" if self.text else ""
        return before + in_template(words, self.options.input_template)

    def _remember(self, words: str, answer: str) -> None:
        self.text = self._continued(words) + answer
        self.turns += [{"role": "user", "content": words}, {"role": "assistant", "content": answer}]


class _Answer:
    """An answer on its way to the reader: only text that later tokens cannot change is shown."""

    def __init__(self, tokenizer: Any, show: Show):
        self.tokenizer, self.show, self.text = tokenizer, show, ""

    def grow(self, ids: list[int], *, last: bool = False) -> None:
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        # A character of several tokens is not whole yet.
        whole = text if last else text.rstrip("\N{REPLACEMENT CHARACTER}")
        if whole.startswith(self.text) and len(whole) > len(self.text):
            self.show(whole[len(self.text) :])
            self.text = whole
