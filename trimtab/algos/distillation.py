"""Distillation: distances between the teacher's and the student's distributions over the next token.

    forward KL   -sum p log q          (the cross-entropy: its gradient is KL(p || q)'s)      p teacher, q student
    reverse KL    sum q (log q - log p)
    JSD(b)        b KL(p || m) + (1 - b) KL(q || m),   m = b p + (1 - b) q                   Agarwal et al. 2024

With b near 0, JSD / b tends to KL(p || q); with b near 1, JSD / (1 - b) tends to KL(q || p).
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

Divergence = Callable[[Tensor, Tensor], Tensor]


def forward_kl(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    return -(teacher_NV.softmax(-1) * student_NV.log_softmax(-1)).sum(-1)


def reverse_kl(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    student = student_NV.log_softmax(-1)
    return (student.exp() * (student - teacher_NV.log_softmax(-1))).sum(-1)


def jensen_shannon(student_NV: Tensor, teacher_NV: Tensor, beta: float) -> Tensor:
    student, teacher = student_NV.log_softmax(-1), teacher_NV.log_softmax(-1)
    if beta in (0.0, 1.0):  # the mixture is one of the two
        first, second = (teacher, student) if beta == 0 else (student, teacher)
        return (first.exp() * (first - second)).sum(-1)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    from_teacher = (teacher.exp() * (teacher - mixture)).sum(-1)
    from_student = (student.exp() * (student - mixture)).sum(-1)
    return beta * from_teacher + (1 - beta) * from_student


def divergence(name: str, jsd_beta: float = 0.5) -> Divergence:
    jsd = partial(jensen_shannon, beta=jsd_beta)
    kinds: dict[str, Divergence] = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd}
    return kinds[name]
