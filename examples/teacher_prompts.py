"""What a policy reads as its own teacher (docs/distillation.md): for wrong answers, a right one.

trimtab grpo --teacher_prompt_func examples/teacher_prompts.py --teacher_divergence reverse_kl ...
"""

TOLD = "{question}\n\nA right answer is:\n{answer}\n\nNow answer in your own words."


def teacher_prompts(prompts, completions, rewards, labels=None, **columns):
    """The prompt with a right answer of the same group or, without one, the row's label; None: the policy's own prompt,
    where the answer was right already or nothing is known."""
    right = {str(p): text_of(c) for p, c, reward in zip(prompts, completions, rewards) if reward >= 1}
    found = []
    for prompt, reward, label in zip(prompts, rewards, labels or [None] * len(prompts)):
        answer = right.get(str(prompt), label)
        found.append(None if reward >= 1 or answer is None else with_answer(prompt, answer))
    return found


def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


def with_answer(prompt, answer):
    """Of a conversation, the last turn is the question."""
    if isinstance(prompt, str):
        return TOLD.format(question=prompt, answer=answer)
    told = TOLD.format(question=prompt[-1]["content"], answer=answer)
    return [*prompt[:-1], {**prompt[-1], "content": told}]
