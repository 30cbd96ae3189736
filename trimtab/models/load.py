"""Load models as the root modules that jobs train or score with: working weights, adapters, path, memory savers.

In one process a model is loaded whole, in fp32; one that is frozen and will be bf16 is read as that at once, to where
it will be. Of a model that is split over several, each reads its own parts (sharded_load); only where that cannot be
done, or where --zero_stage 0 gives every process everything, it is loaded whole and split.
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trimtab.config.groups import DropoutOptions, LoadOptions
from trimtab.config.jobs import AttackOptions, GenerateOptions, RMOptions, ServeRMOptions
from trimtab.config.learner import LearnerOptions
from trimtab.config.rl_jobs import RLOptions
from trimtab.distributed.device import Device
from trimtab.distributed.mesh import Mesh
from trimtab.errors import UserError
from trimtab.models.activation_memory import ActivationOffload, enable_gradient_checkpointing
from trimtab.models.lora import add_adapters, fill_adapters
from trimtab.models.packed import PackedModel, cast_parameters, has_dropout, switch_off_dropout
from trimtab.models.parallel.sharded_load import (
    DirectReader,
    EmptyModel,
    begin_sharded_load,
    cast_frozen,
    fill_weights,
    set_head,
    settle_path,
)
from trimtab.models.parallel.sharded_model import HeldModelOptions, TrainedModelOptions, shard_frozen, shard_trained
from trimtab.models.policy import Policy
from trimtab.models.pretrained import (
    WeightFiles,
    check_model_folder,
    fake_model,
    first_line,
    from_pretrained,
    quiet_transformers,
    refuse_fresh_weights,
    weights_fingerprint,
)
from trimtab.models.reward import (
    HEAD,
    AutoClassifier,
    RewardModel,
    but_for_head,
    drawn_head,
    initialise_head,
    not_a_decoder,
    separate_padding,
)
from trimtab.models.selfcheck import Verdict, choose_path

Within = Callable[[PackedModel], PackedModel]


@dataclass
class Loaded:
    model: PackedModel
    verdict: Verdict
    weights: str  # fingerprint of what was read
    notes: tuple[str, ...] = ()  # what there is to say of it


def load_policy(
    options: HeldModelOptions, device: Device, mesh: Mesh | None = None, *, within: Within = lambda policy: policy
) -> Loaded:
    """A causal LM to be trained, split over the processes of `mesh`; `within`: the root module it is a part of."""
    from transformers import AutoModelForCausalLM

    mesh, pretrain = mesh or Mesh(), options.pretrain
    check_model_folder(pretrain)
    empty = None
    if in_parts(options, mesh):
        empty = begin_sharded_load(pretrain, AutoModelForCausalLM, options, mesh, "--pretrain")
    elif mesh.size == 1 and options.lora_rank > 0:
        empty = _to_be_rounded(pretrain, options, "--pretrain")
    if empty is not None:
        return trained_in_parts(Policy, empty, options, device, mesh, within)
    return to_be_trained(Policy, _causal_lm(pretrain, options, device), options, device, mesh, within)


def fake_policy(options: TrainedModelOptions) -> Policy:
    """The policy without its weights, adapters included, to check options against."""
    from transformers import AutoModelForCausalLM

    model = fake_model(options.pretrain, AutoModelForCausalLM)
    return Policy(add_adapters(model, options) if options.lora_rank > 0 else model)


def load_frozen_policy(
    pretrain: str,
    options: LoadOptions,
    device: Device,
    flag: str = "--ref_pretrain",
    *,
    mesh: Mesh | None = None,
    offload: bool = False,
) -> Loaded:
    """A causal LM that only scores: a reference or a teacher, in the trained model's precision.

    `mesh`: the processes that it is split over (None: this one holds it), with `offload` in main memory.
    """
    from transformers import AutoModelForCausalLM

    check_model_folder(pretrain, flag)
    empty = (
        begin_sharded_load(pretrain, AutoModelForCausalLM, options, mesh, flag)
        if mesh
        else _to_be_rounded(pretrain, options, flag)
    )
    if empty is not None:
        return frozen_in_parts(Policy, empty, pretrain, options, device, mesh, flag, offload)
    model = _causal_lm(pretrain, options, device, flag=flag)
    weights = fingerprint(model, pretrain, options, flag)
    model.requires_grad_(False)
    policy = Policy(model).eval()
    loaded = Loaded(policy, placed(policy, options, device, cast=options.bf16), weights)
    if mesh:
        shard_frozen(policy, mesh, offload=offload)
    return loaded


def fake_frozen_policy(pretrain: str, flag: str) -> Policy:
    """The same without its weights."""
    from transformers import AutoModelForCausalLM

    return Policy(fake_model(pretrain, AutoModelForCausalLM, flag))


def fake_policy_with_fingerprint(pretrain: str, flag: str = "--pretrain") -> tuple[Policy, str]:
    """The same, and the fingerprint of what would be read: where another engine reads it."""
    from transformers import GenerationConfig

    check_model_folder(pretrain, flag)
    policy = fake_frozen_policy(pretrain, flag)
    with contextlib.suppress(UserError):  # not every model has one
        policy.inner.generation_config = from_pretrained(GenerationConfig, pretrain, flag=flag)
    files = WeightFiles.find(pretrain, flag)
    return policy, "other files" if files is None else files.fingerprint()


def _causal_lm(pretrain: str, options: LoadOptions, device: Device, flag: str = "--pretrain") -> nn.Module:
    from transformers import AutoModelForCausalLM

    quiet_transformers()
    model, found = from_pretrained(AutoModelForCausalLM, pretrain, flag=flag, **arguments_of(options, device))
    refuse_fresh_weights(pretrain, found, flag=flag)
    return model


def arguments_of(options: LoadOptions, device: Device) -> dict[str, Any]:
    # A size that does not fit is reported by us, by name.
    arguments = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if options.attn_implementation is not None:
        arguments["attn_implementation"] = options.attn_implementation
    if options.load_in_4bit:
        arguments |= {"quantization_config": _four_bit(), "dtype": torch.bfloat16, "device_map": {"": device.torch}}
    return arguments


def in_parts(options: HeldModelOptions, mesh: Mesh) -> bool:
    """Whether each process reads only its share: without one it needs everything."""
    return mesh.size > 1 and (options.zero_stage > 0 or mesh.sizes["tensor"] > 1)


def _to_be_rounded(pretrain: str, options: LoadOptions, flag: str) -> EmptyModel | None:
    """A model to be read straight from its files in bf16: what is not trained needs no fp32 on the way, which takes
    twice the memory and most of the time. How it may be run is asked of a small copy in fp32. None: it cannot be."""
    from transformers import AutoModelForCausalLM

    if not options.bf16 or options.load_in_4bit or options.attn_implementation is not None:
        return None
    empty = begin_sharded_load(pretrain, AutoModelForCausalLM, options, Mesh(), flag)
    # What is converted on the way is converted by Hugging Face's loader, which rounds at other places.
    return empty if empty is not None and isinstance(empty.reader, DirectReader) else None


def trained_in_parts(
    root: type[PackedModel],
    empty: EmptyModel,
    options: HeldModelOptions,
    device: Device,
    mesh: Mesh,
    within: Within = lambda module: module,
) -> Loaded:
    model, reader = empty.model, empty.reader
    scores = root is not Policy
    head = drawn_head(model) if scores and not empty.has_head else None
    notes = _settle_dropout(model, options) if isinstance(options, DropoutOptions) else ()
    random_state = torch.get_rng_state()
    if options.lora_rank > 0:
        model = add_adapters(model, options, _task_type(root))
    module = root(model)
    verdict = settle_path(module, options, device)
    prepare_training(module, options, device)
    module = within(module)
    if options.bf16 and mesh.size > 1:
        cast_frozen(module)
    elif options.bf16:
        cast_parameters(module, torch.bfloat16)
    shard_trained(module, options, mesh)
    found = fill_weights(module, reader, device.torch, offload=options.adam_offload)
    refuse_fresh_weights(options.pretrain, but_for_head(found) if scores else found)
    if scores:
        set_head(module, head)
    if options.lora_rank > 0:
        after = fill_adapters(module.model, random_state)
        if mesh.size == 1:  # as if the model had been there when they were drawn
            torch.set_rng_state(after)
    return Loaded(module, verdict, empty.weights, notes)


def frozen_in_parts(
    root: type[PackedModel],
    empty: EmptyModel,
    pretrain: str,
    options: LoadOptions,
    device: Device,
    mesh: Mesh | None,
    flag: str,
    offload: bool,
) -> Loaded:
    model = empty.model.requires_grad_(False)
    if root is RewardModel and not hasattr(model, HEAD):
        module, verdict = not_a_decoder(model)
    else:
        module = root(model).eval()
        verdict = settle_path(module, options, device)
    if options.bf16:
        cast_parameters(module, torch.bfloat16)
    if mesh is not None:
        shard_frozen(module, mesh, offload=offload)
    found = fill_weights(module, empty.reader, device.torch, offload=offload)
    refuse_fresh_weights(pretrain, found, flag=flag)
    return Loaded(module, verdict, empty.weights)


def to_be_trained(
    root: type[PackedModel],
    model: nn.Module,
    options: HeldModelOptions,
    device: Device,
    mesh: Mesh,
    within: Within = lambda module: module,
) -> Loaded:
    weights = fingerprint(model, options.pretrain, options, "--pretrain")
    return _made_trainable(root, model, weights, options, device, mesh, within)


def given_policy(model: nn.Module, options: LearnerOptions, device: Device) -> Loaded:
    """A causal LM that somebody has loaded, to be trained as it is, in place."""
    model = model.float()
    return _made_trainable(Policy, model, weights_fingerprint(model), options, device, Mesh())


def _made_trainable(
    root: type[PackedModel],
    model: nn.Module,
    weights: str,
    options: HeldModelOptions,
    device: Device,
    mesh: Mesh,
    within: Within = lambda module: module,
) -> Loaded:
    notes = _settle_dropout(model, options) if isinstance(options, DropoutOptions) else ()
    if in_parts(options, mesh):
        said = "its weights cannot be read in parts (safetensors can), so every process reads them all and then splits"
        notes += (f"note: --pretrain {options.pretrain}: {said} them",)
    if options.load_in_4bit:
        _keep_gradients_on_cpu(model)
    if options.lora_rank > 0:
        model = add_adapters(model, options, _task_type(root))
    module = root(model)
    verdict = placed(module, options, device, cast=options.bf16 and mesh.size == 1)
    prepare_training(module, options, device)
    module = within(module)
    if options.bf16 and mesh.size > 1:
        cast_frozen(module)
    shard_trained(module, options, mesh)
    return Loaded(module, verdict, weights, notes)


def _task_type(root: type[PackedModel]) -> str:
    return "CAUSAL_LM" if root is Policy else "SEQ_CLS"


def prepare_training(module: PackedModel, options: HeldModelOptions, device: Device) -> None:
    if options.use_liger_kernel:
        _apply_liger(module.model, device)
    enable_gradient_checkpointing(module, options)
    if options.offload_activations and device.is_accelerator:
        module.activations = ActivationOffload(module)
    module.train()


def fingerprint(model: nn.Module, pretrain: str, options: LoadOptions, flag: str) -> str:
    """Of the files, which every process can look at; of the parameters where the files are of another kind."""
    files = None if options.load_in_4bit else WeightFiles.find(pretrain, flag)
    return weights_fingerprint(model) if files is None else files.fingerprint()


def _settle_dropout(model: nn.Module, options: DropoutOptions) -> tuple[str, ...]:
    """Before adapters are added, whose dropout is a wish of its own."""
    if options.keep_dropout:
        return () if has_dropout(model) else ("--keep_dropout has no effect: the model has no dropout",)
    if not switch_off_dropout(model):
        return ()
    return ("the model's own dropout is off, as it is in what updates are compared with; --keep_dropout keeps it",)


def placed(module: PackedModel, options: LoadOptions, device: Device, *, cast: bool) -> Verdict:
    """Choose the path, cast and move to the device, in this order: rounding would blur the comparison."""
    ours = options.attn_implementation is None
    verdict = choose_path(module) if ours else None
    if cast:
        cast_parameters(module, torch.bfloat16)
    module.to(device.torch)
    # An implementation that was asked for by name may know only half precision, or only the accelerator.
    return verdict or choose_path(module, packed_allowed=False)


def _keep_gradients_on_cpu(model: nn.Module) -> None:
    """On some CPUs bitsandbytes repacks weights for good when it first sees eval mode, and then has no gradient."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _four_bit():
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # advice about kernels for inference
    try:
        import bitsandbytes  # noqa: F401
        from transformers import BitsAndBytesConfig
    except Exception as error:  # a broken set-up raises anything
        raise UserError(f"--load_in_4bit: bitsandbytes does not work here ({first_line(error)}); drop it") from error
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def _apply_liger(model: nn.Module, device: Device) -> None:
    if not device.is_accelerator:
        raise UserError("--use_liger_kernel: its kernels need an accelerator, and none is here; leave it out")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError as error:
        raise UserError("--use_liger_kernel: the package is not installed; pip install 'trimtab[liger]'") from error
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    # Our own chunked head replaces Liger's fused loss.
    _apply_liger_kernel_to_instance(base, fused_linear_cross_entropy=False)


# ---- Load sequence classifiers with one score: reward models and critics to be trained, reward models that only
# score.


RewardLoadOptions = RMOptions | RLOptions | GenerateOptions | AttackOptions | ServeRMOptions
"""What has LoadOptions and RewardHeadOptions."""


def load_reward_model(
    options: RMOptions | RLOptions,
    device: Device,
    tokenizer: Any,
    mesh: Mesh | None = None,
    *,
    root: type[PackedModel] = RewardModel,
) -> Loaded:
    """A reward model or critic to be trained, from one that has a head already or from a causal LM; split over the
    processes of `mesh`."""
    mesh, pretrain = mesh or Mesh(), options.pretrain
    head = _stored_head(pretrain, options)
    if in_parts(options, mesh) and (empty := _unfilled_classifier(pretrain, options, mesh, head)):
        _require_head(empty.model, pretrain)
        separate_padding(empty.model, tokenizer)
        return trained_in_parts(root, empty, options, device, mesh)
    model, found = _classifier(pretrain, options, device, head)
    _require_head(model, pretrain)
    if _without_head(found):
        initialise_head(model)
    refuse_fresh_weights(pretrain, but_for_head(found))
    separate_padding(model, tokenizer)
    return to_be_trained(root, model, options, device, mesh)


def load_frozen_reward_model(
    pretrain: str,
    options: RewardLoadOptions,
    device: Device,
    tokenizer: Any,
    flag: str = "--reward_pretrain",
    *,
    mesh: Mesh | None = None,
    offload: bool = False,
) -> Loaded:
    """A reward model that only scores: ours, or any sequence classifier with one score. `mesh`, `offload`: as those of
    a frozen policy."""
    head = _stored_head(pretrain, options, flag)
    if mesh and (empty := _unfilled_classifier(pretrain, options, mesh, head, flag)):
        if hasattr(empty.model, HEAD) and not empty.has_head:
            raise UserError(_NO_HEAD.format(flag, pretrain))
        separate_padding(empty.model, tokenizer)
        return frozen_in_parts(RewardModel, empty, pretrain, options, device, mesh, flag, offload)
    model, found = _classifier(pretrain, options, device, head, flag)
    if _without_head(found):
        raise UserError(_NO_HEAD.format(flag, pretrain))
    refuse_fresh_weights(pretrain, found, flag=flag)
    separate_padding(model, tokenizer)
    weights = fingerprint(model, pretrain, options, flag)
    model.requires_grad_(False)
    if hasattr(model, HEAD):
        reward = RewardModel(model).eval()
        verdict = placed(reward, options, device, cast=options.bf16)
    else:
        reward, verdict = not_a_decoder(model)
        if options.bf16:
            cast_parameters(reward, torch.bfloat16)
        reward.to(device.torch)
    if mesh:
        shard_frozen(reward, mesh, offload=offload)
    return Loaded(reward, verdict, weights)


_NO_HEAD = "{} {}: a model without a trained score head; make one of it with trimtab rm"


def _stored_head(pretrain: str, options: RewardLoadOptions, flag: str = "--pretrain") -> str:
    """What the score head is called in the files."""
    from transformers import AutoConfig

    check_model_folder(pretrain, flag)
    quiet_transformers()
    return getattr(from_pretrained(AutoConfig, pretrain, flag=flag), "value_head_prefix", options.value_head_prefix)


def _unfilled_classifier(
    pretrain: str, options: RewardLoadOptions, mesh: Mesh, head: str, flag: str = "--pretrain"
) -> EmptyModel | None:
    return begin_sharded_load(pretrain, AutoClassifier, options, mesh, flag, head=head, num_labels=1)


def _classifier(
    pretrain: str, options: RewardLoadOptions, device: Device, head: str, flag: str = "--pretrain"
) -> tuple[nn.Module, dict]:
    """A sequence classifier with one score, and what loading found."""
    arguments = arguments_of(options, device) | {"num_labels": 1}
    if head != HEAD:
        arguments["key_mapping"] = {rf"^{head}\.": f"{HEAD}."}
    return from_pretrained(AutoClassifier, pretrain, flag=flag, **arguments)


def _without_head(found: dict) -> bool:
    weight = f"{HEAD}.weight"
    return weight in found["missing_keys"] or any(key[0] == weight for key in found["mismatched_keys"])


def fake_reward_model(options: TrainedModelOptions, flag: str = "--pretrain") -> RewardModel:
    """`flag`: what the user calls the model."""
    model = fake_model(options.pretrain, AutoClassifier, flag, num_labels=1)
    _require_head(model, options.pretrain, flag)
    return RewardModel(add_adapters(model, options, "SEQ_CLS") if options.lora_rank > 0 else model)


def _require_head(model: nn.Module, pretrain: str, flag: str = "--pretrain") -> None:
    if not hasattr(model, HEAD):
        raise UserError(f"{flag} {pretrain}: {type(model).__name__} is not a decoder with a score head")
