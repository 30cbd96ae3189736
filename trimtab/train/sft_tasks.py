"""Supervised fine-tuning (sft) and knowledge distillation (kd) as tasks of the supervised loop."""

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from trimtab.algos.supervised_losses import divergence, sft_loss_sum
from trimtab.config.jobs import KDOptions, SFTOptions
from trimtab.data.batches import TokenBatch
from trimtab.data.examples import build_sft_dataset
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import Device
from trimtab.distributed.fsdp import whole
from trimtab.errors import UserError
from trimtab.models.load import Loaded, fake_frozen_policy
from trimtab.models.policy import Policy, Teacher
from trimtab.train.task import FrozenScorer, Task
from trimtab.train.update import LossTerm, Totals


class SFTTask(Task):
    options: SFTOptions | KDOptions
    verb = "sft"

    def build_dataset(self, rows, what):
        return build_sft_dataset(rows, self.tokenizer, self.options, what=what)

    def make_batch(self, store, samples: list[int]) -> TokenBatch:
        return TokenBatch.of([store.example(i) for i in samples])

    def loss(self, model: Policy, batch: TokenBatch, totals: Totals) -> LossTerm:
        out = model(batch, router=self.balances_experts(model))
        loss = sft_loss_sum(out.log_probs_N) / totals["trained_tokens"]
        return self.share(loss, {}, out, model, batch, totals)


# ---- knowledge distillation


class KDTask(SFTTask):
    options: KDOptions
    verb = "kd"

    def attach(self, loaded: Loaded, device: Device) -> None:
        options = self.options
        how: dict[str, Any] = {"pretrain": options.teacher_model, "offload": options.teacher_offload}
        self.teacher = FrozenScorer(options, None, device, self.mesh, flag="--teacher_model", **how)
        self.scorers["teacher"] = self.teacher
        for root in (loaded.model, self.teacher.model):
            if root.path == "logits":
                raise UserError(f"{type(root.inner).__name__} has an LM head we cannot read; distil another model")
        # The loss computes the teacher's logits in chunks together with the student's, outside of the forward pass that
        # gathers a sharded teacher. So a sharded teacher needs a gathered copy of its head.
        model = self.teacher.model
        self.head = whole_head(model, device.torch) if self.teacher.is_split else model.head
        self.divergence = divergence(options.kd_loss, options.jsd_beta)

    def check_model(self, model: Policy) -> None:
        """Refuse a teacher with another vocabulary: distributions are compared token by token."""
        super().check_model(model)
        name = self.options.teacher_model
        theirs = load_tokenizer(name, disable_fast=self.options.disable_fast_tokenizer, flag="--teacher_model")
        sizes = [m.head.out_features for m in (model, fake_frozen_policy(name, flag="--teacher_model"))]
        if theirs.get_vocab() != self.tokenizer.get_vocab() or sizes[0] != sizes[1]:
            raise UserError(
                f"--teacher_model {name}: its vocabulary ({sizes[1]:,} outputs) is not the student's ({sizes[0]:,}); "
                "distil between models that share a tokenizer"
            )

    def prepare(self, model: Policy, batches: list[TokenBatch]) -> None:
        with self.teacher.at_work() as teacher:
            for batch in batches:
                batch.extra["teacher_ND"] = teacher(batch, hidden_only=True).hidden_ND
        self.head.to(self.teacher.device.torch)

    def loss(self, model: Policy, batch: TokenBatch, totals: Totals) -> LossTerm:
        teacher = Teacher(batch.extra["teacher_ND"], self.head, self.teacher.model.logit_shape, self.divergence)
        out = model(batch, router=self.balances_experts(model), teacher=teacher)
        nll = sft_loss_sum(out.log_probs_N) / totals["trained_tokens"]
        distance = out.divergence_N.sum() / totals["trained_tokens"]
        loss = (1 - self.options.kd_coef) * nll + self.options.kd_coef * distance
        return self.share(loss, {"nll": nll.detach(), "distance": distance.detach()}, out, model, batch, totals)


def whole_head(policy: Policy, device: torch.device) -> nn.Module:
    """A gathered copy of a sharded policy's head, without FSDP hooks."""
    head = copy.copy(policy.head)
    for hooks in ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called"):
        setattr(head, hooks, OrderedDict())
    head._parameters = {
        name: None if parameter is None else nn.Parameter(whole(parameter).to(device), requires_grad=False)
        for name, parameter in policy.head._parameters.items()
    }
    return head
