"""The two kinds of micro-batch that an update of the policy learns from.

Answers bring columns of their tokens in `extra` (advantages_N, sampled_N and others); text has its tokens alone.
"""

from trimtab.data.batches import TokenBatch


class AnswerBatch(TokenBatch):
    """Sampled answers after their prompts."""


class TextBatch(TokenBatch):
    """Text that is learnt beside the answers (PTX)."""
