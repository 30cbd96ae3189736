"""Before a run: does the environment open an episode, and can the policy read what it says?"""

from transformers import PreTrainedTokenizerBase

from trimtab.agents.language import CannotSay, Language
from trimtab.agents.session import opening
from trimtab.config.agents import EnvironmentOptions
from trimtab.envs.replies import Broken, Opened, Reply
from trimtab.envs.types import Task
from trimtab.errors import UserError
from trimtab.serving.playing import open_pool, settings_of


def try_environment(
    options: EnvironmentOptions, task: Task, prompt_ids: list[int], tokenizer: PreTrainedTokenizerBase, *, plain: bool
) -> list[str]:
    """What is told of it. `prompt_ids`: of the task's row; `plain`: prompts are in no chat template."""
    settings = settings_of(options, plain=plain)
    pool = open_pool(options)
    try:
        about = pool.about
        told = f"{about.kind}: {about.name}, {about.shape}"
        if about.kind == "agent":
            return [told]
        Language(tokenizer, about.tools, (), settings)
        pool.reset(0, task)
        replies: list[Reply] = []
        while not replies:
            replies = pool.finished(1.0)
    finally:
        pool.close()
    (reply,) = replies
    if isinstance(reply, Broken):
        raise UserError(f"{options.environment_flag} was tried and failed: {reply.words}")
    assert isinstance(reply, Opened)
    try:
        opening(Language(tokenizer, reply.tools, (), settings), reply, task, prompt_ids)
    except CannotSay as error:
        raise UserError(f"{options.environment_flag} was tried and failed: {error}") from error
    tools = ", ".join(tool["function"]["name"] for tool in reply.tools)
    return [f"{told}; it opens with {_words(reply)}{f'; tools: {tools}' if tools else ''}"]


def _words(reply: Opened) -> str:
    if reply.messages is None:
        return "the prompt"
    said = str(reply.messages[-1].get("content"))
    return said.replace("\\", "\\\\").replace("\n", "\\n")
