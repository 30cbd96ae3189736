"""A conversation with a model: `trimtab chat`, or `python -m trimtab.cli.interactive_chat`.

At a terminal or from a pipe, a line a turn. /clear begins a new conversation, /quit or the end of the input leaves, and
/help says so. Ctrl-C stops the answer that is being written, not the program.
"""

import sys
from collections.abc import Sequence

from trimtab.cli.main import enable_line_editing, read_line, run_job
from trimtab.config.jobs import ChatOptions
from trimtab.errors import UserError
from trimtab.job import say

HELP = "/clear begins anew, /quit or Ctrl-D leaves, Ctrl-C stops an answer; everything else is said to the model"


def main(argv: Sequence[str] | None = None) -> int:
    return run_job(ChatOptions, argv, talk)


def talk(options: ChatOptions) -> None:
    from trimtab.evaluate.interactive import Conversation

    conversation = Conversation(options)
    if sys.stdin.isatty():
        enable_line_editing()
        form = "its chat template" if conversation.as_chat else "--input_template"
        say(f"{options.pretrain}, with {form}. {HELP}.")
    while True:
        try:
            words = read_line()
        except EOFError:
            return
        except KeyboardInterrupt:
            say("\n/quit or Ctrl-D leaves")
            continue
        if words == "/quit":
            return
        if words == "/help":
            say(HELP)
        elif words == "/clear":
            conversation.clear()
        elif words:
            _answer(conversation, words)


def _answer(conversation, words: str) -> None:
    try:
        finish = conversation.ask(words, lambda text: print(text, end="", flush=True))
    except UserError as error:
        say(f"trimtab chat: {error}")
        return
    print(flush=True)
    if finish == "length":
        say(f"trimtab chat: the answer ends here, at {conversation.most_tokens} tokens; /clear begins anew")


if __name__ == "__main__":
    raise SystemExit(main())
