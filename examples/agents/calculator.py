"""An environment with a tool: sums are asked, and a calculator may be used before the answer is given.

    trimtab play examples/agents/calculator.py                 try it: /calculate expression=17*23
    examples/agents/calculator.sh                              train on it

What the tool says goes back to the model as its next turn; a turn without a call is the answer.
"""

import ast
import operator
import random
import re

from trimtab.envs.types import Step, Task, Turn

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def rows(count: int, seed: int) -> list[dict]:
    """The questions, where no --prompt_data is given."""
    numbers = random.Random(seed)
    found = []
    for _ in range(count):
        text = f"{numbers.randint(10, 999)} {numbers.choice('+-*')} {numbers.randint(10, 999)}"
        found.append({"prompt": f"What is {text}? Give the number alone.", "label": calculate(text)})
    return found


def calculate(expression: str) -> str:
    """Work out a sum, a difference or a product of whole numbers.

    Args:
        expression: for example 17 * (4 + 5)
    """
    return str(_value(ast.parse(expression, mode="eval").body))


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("only whole numbers with + - * and brackets")


class Calculator:
    tools = (calculate,)

    def reset(self, task: Task) -> None:
        self.answer = str(task.label)

    def step(self, turn: Turn) -> Step:
        numbers = re.findall(r"-?\d+", turn.text.replace(",", ""))
        return Step(reward=float(numbers[-1:] == [self.answer]), done=True)

    def close(self) -> None: ...
