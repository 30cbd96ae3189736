"""The model runner: forward passes of the trainer's own model for prefill and decode.

A pass goes through the model's modules, or through fused layers (fused_layers.py) if the model is supported.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trimtab.data.batches import Span, TokenBatch
from trimtab.distributed.device import widest
from trimtab.distributed.fsdp import sharded_parts
from trimtab.errors import UserError
from trimtab.models.attention import PackedRow, carry, unpadded
from trimtab.models.lm_head import shaped_logits, whole_logits
from trimtab.models.packed import backbone_of
from trimtab.models.policy import Policy
from trimtab.models.recurrent import recurrent_modules
from trimtab.models.selfcheck import FAILURES, cannot_run
from trimtab.rollout.builtin.attention import (
    NAME,
    Arguments,
    AttentionProbe,
    CachedAttention,
    CachedPrefill,
    DecodeMetadata,
    PrefillMetadata,
    SinglePart,
    register,
)
from trimtab.rollout.builtin.kv_cache import KVCache, KVShape
from trimtab.rollout.builtin.state_cache import DecodeStates, PrefillStates, States, state_bytes

if TYPE_CHECKING:
    from trimtab.rollout.builtin.kernels.decode_step import DecodeInputs
import logging
from functools import partial
from itertools import pairwise

from torch import nn

from trimtab.distributed.device import has_kernels
from trimtab.models.compile import off_by
from trimtab.models.fused_layer import is_llama_like
from trimtab.models.precompile import compile_together
from trimtab.models.pretrained import first_line
from trimtab.models.routing import recorded_routes, replayed_routes
from trimtab.rollout.builtin.fused_layers import FusedLayers

_LOOKED_AT = 16  # numbers of every tensor


def switches(policy: Policy) -> tuple:
    """State of adapters, and number of modules with a replaced `forward`."""
    every = list(policy.modules())
    adapters = tuple(
        (module._disable_adapters, tuple(module.active_adapters), tuple(module.scaling.items()))
        for module in every
        if hasattr(type(module), "_disable_adapters") and hasattr(module, "scaling")
    )
    return adapters, sum("forward" in vars(module) for module in every)


def is_sharded(policy: Policy) -> bool:
    """Whether its parameters are sharded over processes."""
    return bool(sharded_parts(policy))


@torch.no_grad()
def sampled_weights(policy: Policy) -> tuple:
    """Differs after every change of weights: torch counts in-place writes; for writes that bypass its counters
    (`.data`), a few numbers of every tensor are compared. Cached keys and values of other weights must not be used."""
    tensors = [*policy.parameters(), *policy.buffers()]
    counted = tuple((tensor.data_ptr(), tensor._version) for tensor in tensors)
    wide = widest(policy.device)
    looked_at = [tensor.reshape(-1)[:: max(1, tensor.numel() // _LOOKED_AT)].to(wide) for tensor in tensors]
    numbers = torch.cat(looked_at).cpu().numpy().tobytes() if looked_at else b""
    return counted, switches(policy), numbers


# ---- forward passes


@contextlib.contextmanager
def generating(policy: Policy, attention: CachedAttention | AttentionProbe, *, kernels: bool) -> Iterator[None]:
    """Switch the policy to evaluation mode with this attention. `kernels`: they take the place of modules, where the
    device has them."""
    register()
    before, every = policy.inner.config._attn_implementation, list(policy.modules())
    training = [module for module in every if module.training]
    policy.inner.set_attn_implementation(NAME)
    for module in training:
        module.training = False
    carry(every, attention)
    modules: contextlib.AbstractContextManager = contextlib.nullcontext()
    if kernels and policy.path == "packed" and has_kernels(policy.device):
        from trimtab.rollout.builtin.kernels.modules import fused_modules

        modules = fused_modules(every)
    try:
        with modules:
            yield
    finally:
        carry(every, None)  # drop the reference to the KV cache
        policy.inner.set_attn_implementation(before)
        for module in training:
            module.training = True


class ModelRunner:
    """A context manager: inside, the policy runs with the engine's attention."""

    caches = True

    def __init__(self, policy: Policy, cache: KVCache, fused: "FusedLayers | None" = None, *, kernels: bool = True):
        """`fused`: the policy's layers, if they are supported; `kernels`: without these, other kernels take the place
        of modules."""
        self.policy, self.cache = policy, cache
        self.fused = None if fused is None or fused.failed else fused
        self.kernels = kernels and self.fused is None
        self.device = policy.device
        self.recurrent = bool(recurrent_modules(policy.inner))
        self.reads_whole = self.recurrent  # a prefill cannot continue from cached tokens
        self.states: Sequence[States | None] = []  # of the last prefill's sequences, if layers are recurrent

    @staticmethod
    @torch.no_grad()
    def measure(policy: Policy) -> tuple[KVShape, list[Arguments]]:
        """Shape of the KV cache and arguments of every attention call, recorded in a forward pass of one token, because
        configurations name them differently."""
        if policy.path != "packed":  # it caches nothing
            return KVShape((), next(policy.parameters()).dtype), []
        attention = AttentionProbe(policy.config)
        with generating(policy, attention, kernels=False):
            one = torch.zeros((1, 1), dtype=torch.long, device=policy.device)
            backbone_of(policy.inner)(input_ids=one, attention_mask=unpadded(one), position_ids=one, use_cache=False)
        shapes = tuple(shape for shape, _ in attention.calls)
        states = state_bytes(attention.states)
        return KVShape(shapes, attention.dtype, states), [arguments for _, arguments in attention.calls]

    def __enter__(self) -> "ModelRunner":
        self.attention = CachedAttention(self.cache)
        self._generating = generating(self.policy, self.attention, kernels=self.kernels)
        self._generating.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        del self.attention
        self._generating.__exit__(*exception)

    def prefill(self, sequences: list[tuple[list[int], int, list[int]]]) -> Tensor:
        """Prefill (ids, how many are cached, pages); returns the last hidden state of each [S, D]. Recurrent layers
        need whole sequences, whose states are then in `states`."""
        last = np.cumsum([len(tokens) - done for tokens, done, _ in sequences]) - 1
        return self.prefill_hidden(sequences)[last.tolist()]

    def states_of_one(self) -> States:
        """States of a sequence of one token, whose keys go to page 0."""
        self.prefill([([0], 0, [0])])
        (states,) = self.states
        assert states is not None
        return states

    def prefill_hidden(self, sequences: list[tuple[list[int], int, list[int]]]) -> Tensor:
        """`prefill` with the hidden states of all tokens that were not cached [T, D]."""
        spans, ids, positions, slots, wholes, start = [], [], [], [], [], 0
        for tokens, done, pages in sequences:
            own = len(tokens) - done
            where = self.slots(pages, len(tokens))
            spans.append(Span(start, own))
            ids += tokens[done:]
            positions.append(np.arange(done, len(tokens)))
            slots.append(where[done:])
            wholes.append(where)
            start += own
        row, ids = PackedRow.of(spans, self.device), torch.tensor(ids, device=self.device)
        goes_on = any(done for _, done, _ in sequences)
        continued = CachedPrefill(spans, wholes, self.device) if goes_on else None
        assert not (self.recurrent and goes_on)
        states = PrefillStates.of(spans, self.policy.config, self.device) if self.recurrent else None
        hidden = self.hidden_states(row, ids, self._tensor(*positions), self._tensor(*slots), continued, states)
        self.states = [None] * len(spans) if states is None else states.split()
        return hidden

    def prefill_answers(self, prompts: list[tuple[list[int], list[tuple[list[int], list[int]]]]]) -> None:
        """Prefill answers (ids, pages of the whole sequence) to prompts that are cached. The prompts' tokens are in the
        row again for the answers to attend to, and are stored on page 0: attention of one packed row is faster than
        several launches for every answer and layer."""
        spans, ids, positions, slots, start = [], [], [], [], 0
        for prompt, answers in prompts:
            before, first = len(prompt), start
            spans.append(Span(start, before))
            ids += prompt
            positions.append(np.arange(before))
            slots.append(np.zeros(before, dtype=np.int64))  # page 0, which is never read
            start += before
            for tokens, pages in answers:
                whole = before + len(tokens)
                spans.append(Span(start, len(tokens), first, before))
                ids += tokens
                positions.append(np.arange(before, whole))
                slots.append(self.slots(pages, whole)[before:])
                start += len(tokens)
        row = PackedRow.of(spans, self.device)
        self.hidden_states(row, self._tensor(np.array(ids)), self._tensor(*positions), self._tensor(*slots))

    def _tensor(self, *parts: np.ndarray) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self.device)

    def hidden_states(
        self,
        row: PackedRow,
        ids_T: Tensor,
        positions_T: Tensor,
        slot_mapping_T: Tensor,
        continued: CachedPrefill | SinglePart | None = None,
        states: PrefillStates | None = None,
    ) -> Tensor:
        self.attention.begin(PrefillMetadata(row, slot_mapping_T, continued, states))
        return self._hidden(ids_T[None], positions_T[None], slot_mapping_T)[0]

    def decode(
        self,
        tokens_B: Tensor,
        positions_B: Tensor,
        tables_BP: Tensor,
        idle_B: Tensor | None = None,
        states: DecodeStates | None = None,
    ) -> Tensor:
        """The next hidden state of every sequence [B, D], from its newest token. Idle ones write to page 0."""
        size = self.cache.size
        page = tables_BP.gather(1, (positions_B // size)[:, None])[:, 0]
        if idle_B is not None:
            page = page.masked_fill(idle_B, 0)
        slots = page * size + positions_B % size
        self.attention.begin(DecodeMetadata(slots, tables_BP, positions_B + 1, states))
        return self._hidden(tokens_B[:, None], positions_B[:, None], slots)[:, 0]

    def decode_from(self, decode_inputs: "DecodeInputs", tables_BP: Tensor) -> Tensor:
        """The same with fused layers, from prepared inputs."""
        assert self.fused is not None
        self.attention.begin(DecodeMetadata(decode_inputs.slot_mapping_B, tables_BP, decode_inputs.lengths_B))
        attend, slots = self.attention.attend, decode_inputs.slot_mapping_B
        return self.fused.run_layers(
            self.fused.all, decode_inputs.stream_BD, decode_inputs.angles, self.cache, slots, attend
        )

    def logits(self, hidden_ND: Tensor) -> Tensor:
        raw = whole_logits(hidden_ND, self.policy.head)
        return shaped_logits(raw, self.policy.logit_shape, 1.0)

    def _hidden(self, ids: Tensor, positions: Tensor, slot_mapping_T: Tensor) -> Tensor:
        if self.fused is not None:
            given = ids.flatten(), positions.flatten(), self.cache, slot_mapping_T, self.attention.attend
            try:
                return self.fused.hidden(*given).view(*ids.shape, -1)
            except Exception as error:
                if not self.fused.give_up_after(error):
                    raise
                self.fused = None  # the modules overwrite the same positions
        inputs = {"input_ids": ids, "attention_mask": unpadded(ids), "position_ids": positions}
        return backbone_of(self.policy.inner)(**inputs, use_cache=False).last_hidden_state

    def slots(self, pages: list[int], length: int) -> np.ndarray:
        size, token = self.cache.size, np.arange(length)
        return np.asarray(pages)[token // size] * size + token % size


class RecomputeRunner(ModelRunner):
    """For models that take no packed rows: every step runs whole sequences again in padded rows, as the trainer does.
    Slow, but right for any model; nothing is cached."""

    caches = False

    def __init__(self, policy: Policy, cache: KVCache, most: int):
        """`most`: tokens of a pass, with padding."""
        super().__init__(policy, cache)
        self.most, self.reads_whole = most, True

    def __enter__(self) -> "RecomputeRunner":
        self._training = self.policy.training
        self.policy.eval()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.policy.train(self._training)

    def prefill(self, sequences: list[tuple[list[int], int, list[int]]]) -> Tensor:
        return torch.cat(self._read(sequences, last=True))

    def prefill_hidden(self, sequences: list[tuple[list[int], int, list[int]]]) -> Tensor:
        return torch.cat(self._read(sequences, last=False))

    def _read(self, sequences: list[tuple[list[int], int, list[int]]], *, last: bool) -> list[Tensor]:
        """Hidden states of each sequence, of all tokens or of the last; or logits, if the model gives nothing else."""
        found: dict[int, Tensor] = {}
        left = sorted(range(len(sequences)), key=lambda i: -len(sequences[i][0]))
        while left:
            # A model's own logits have the width of the vocabulary for every token.
            rows = 1 if self.policy.path == "logits" else max(1, self.most // len(sequences[left[0]][0]))
            together, left = left[:rows], left[rows:]
            texts = [np.array(sequences[i][0]) for i in together]
            batch = TokenBatch.of([(ids, np.ones(len(ids), dtype=bool)) for ids in texts]).to(self.policy.device)
            if self.policy.path == "logits":
                places, logits = self.policy.own_logits(batch)
                states_TX = logits.flatten(0, 1)[places.flat_T]
            else:
                states_TX, _ = self.policy.hidden(batch)
            for i, span in zip(together, batch.spans):
                end = span.start + span.length
                found[i] = states_TX[end - 1 if last else span.start : end]
        self.states = [None] * len(sequences)
        return [found[i] for i in range(len(sequences))]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return hidden_ND.float() if self.policy.path == "logits" else super().logits(hidden_ND)


# ---- which models have fused layers
#
# A model gets fused layers (fused_layers.py) if it is Llama-like in structure and passes the self-check: every layer is
# run with a few tokens, in prefill and decode, on the residual stream that the modules gave it, and compared with its
# module. Over all layers rounding errors add up (in bf16 to 5 % at 32 layers of 4,096), in one layer they are so small
# that a wrong one stands out.


logger = logging.getLogger(__name__)

WHOLE_TOLERANCE = 0.3
READ = 9  # tokens of the self-check's prefill, before one decode step
MORE = 256, 2048  # tokens of other prefills, whose kernels are compiled beforehand


def build_fused_layers(
    policy: Policy,
    shape: KVShape,
    arguments: list[dict],
    page: int,
    steps: Callable[[ModelRunner], object] | None = None,
) -> FusedLayers | None:
    """The policy's fused layers, if the device has kernels, the model is supported and the self-check passes. `page`:
    tokens of a page. `steps`: also runs with these layers, so its kernels are compiled with theirs."""
    backbone = backbone_of(policy.inner)
    # Fused projections split query, key and value into heads of one width.
    if shape.width is None or not has_kernels(policy.device) or not is_llama_like(backbone):
        return None
    used = ("scaling", "sliding_window", "softcap")
    # In fp32 the trainer has another kernel for whole rows.
    own = {"fused": shape.dtype in (torch.bfloat16, torch.float16), "splits": 1 if policy.attention.fused else None}
    every = [{name: asked.get(name) for name in used} | own for asked in arguments]
    fused = FusedLayers(backbone, every, policy.attention.fused)

    @torch.no_grad()
    def noted() -> None:
        for tokens in (READ, *MORE):
            _few_hidden_states(policy, _memory(shape, page, policy.device, tokens), fused, tokens)
        if steps is not None:
            with ModelRunner(policy, _memory(shape, page, policy.device), fused) as runner:
                steps(runner)
        _few_hidden_states(policy, _memory(shape, page, policy.device), None, kernels=False)  # for the self-check

    try:
        with fused.one_of_each_kind():
            compile_together(noted, policy.device)
        return fused if passes_self_check(fused, policy, shape, page) else None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a kernel compiler may fail in many ways; the modules do not need it
        logger.warning("the model's layers are not fused and generate more slowly: %s", first_line(error))
        return None


@torch.no_grad()
def passes_self_check(fused: FusedLayers, policy: Policy, shape: KVShape, page: int) -> bool:
    with _streams(fused.backbone) as passes, recorded_routes(fused.backbone) as routes:
        expected = _few_hidden_states(policy, _memory(shape, page, policy.device), None, kernels=False)
    followed = CheckedLayers(fused, passes)
    with replayed_routes(routes):
        found = _few_hidden_states(policy, _memory(shape, page, policy.device), followed)
    ends = _is_close(found, expected, torch.zeros_like(expected))
    with replayed_routes(routes):
        whole = _few_hidden_states(policy, _memory(shape, page, policy.device), fused).float() - expected.float()
    # Over all layers, with accumulated rounding errors.
    return followed.same and ends and bool(whole.norm() <= WHOLE_TOLERANCE * expected.float().norm())


@torch.no_grad()
def check_decode(policy: Policy, shape: KVShape, page: int) -> None:
    """Raise UserError if layers with a state fail for single tokens: their kernels for these are others than in
    training."""
    try:
        _few_hidden_states(policy, _memory(shape, page, policy.device), None)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        raise UserError(f"the built-in engine: {cannot_run(error)}") from error


class CheckedLayers(FusedLayers):
    """Fused layers that each start from the residual stream of the modules, and are compared with them."""

    def __init__(self, fused: FusedLayers, passes: list[list[Tensor]]):
        """`passes`: of each pass the residual stream [T, D] before every layer and after the last."""
        super().__init__(fused.backbone, fused.arguments, fused.exact)
        self.passes, self.same = iter(passes), True

    def give_up_after(self, error: Exception) -> bool:
        return False

    def hidden(self, ids_T: Tensor, positions_T: Tensor, cache: KVCache, slot_mapping_T: Tensor, attend) -> Tensor:
        streams, angles = next(self.passes), self.angles(positions_T)
        first = self.backbone.embed_tokens(ids_T)
        self.same &= _is_close(first, streams[0], torch.zeros_like(first))
        for index, (before, after) in enumerate(pairwise(streams)):
            found = before.clone()
            normed = self.run_layers(range(index, index + 1), found, angles, cache, slot_mapping_T, attend)
            self.same &= _is_close(found, after, before)
        return normed


def _is_close(found_TD: Tensor, expected_TD: Tensor, before_TD: Tensor) -> bool:
    return bool((off_by(found_TD, expected_TD, before_TD) <= 1).all())


@contextlib.contextmanager
def _streams(backbone: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Record the residual stream [T, D] before every layer and after the last, of each pass inside."""
    passes: list[list[Tensor]] = []

    def keep(module: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        if module is backbone.layers[0]:
            passes.append([])
        stream = given[0] if given else named["hidden_states"]
        passes[-1].append(stream.flatten(0, -2))

    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in (*backbone.layers, backbone.norm)]
    try:
        yield passes
    finally:
        for hook in hooks:
            hook.remove()


def _memory(shape: KVShape, page: int, device: torch.device, tokens: int = READ) -> KVCache:
    return KVCache(shape, -(-(tokens + 1) // page), page, device)


def _few_hidden_states(
    policy: Policy, cache: KVCache, fused: FusedLayers | None, tokens: int = READ, *, kernels: bool = True
) -> Tensor:
    ids = [(7 * i + 3) % policy.head.out_features for i in range(tokens + 1)]
    pages = list(range(1, -(-len(ids) // cache.size) + 1))
    tensor = partial(torch.tensor, device=policy.device)
    with ModelRunner(policy, cache, fused, kernels=kernels) as runner:
        read = runner.prefill([(ids[:-1], 0, pages)])
        states = DecodeStates.of([s for s in runner.states if s], policy.config) if runner.recurrent else None
        decoded = runner.decode(tensor(ids[-1:]), tensor([len(ids) - 1]), tensor([pages]), states=states)
    return torch.cat([read, decoded])
