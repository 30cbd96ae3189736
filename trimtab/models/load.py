"""Loading of models as root modules of jobs: dtype, LoRA, attention path, gradient checkpointing, offload.

In one process a model is loaded whole in fp32; frozen weights that will be bf16 are read in bf16 from the files. Of a
sharded model each process reads its own shards (parallel/sharded_checkpoint). Only if that is impossible, or if
--zero_stage 0 replicates the model, it is loaded whole and then sharded.
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from trimtab.config.jobs import AttackOptions, GenerateOptions, LearnerOptions, RMOptions, ServeRMOptions
from trimtab.config.rl_jobs import RLOptions
from trimtab.config.training_options import DropoutOptions, LoadOptions, ModelOptions
from trimtab.distributed.device import Device
from trimtab.distributed.fsdp import reshard_model
from trimtab.distributed.mesh import Mesh
from trimtab.errors import UserError
from trimtab.models.activation_memory import ActivationOffload, enable_gradient_checkpointing
from trimtab.models.compile import fuse_layers, unfuse_layers
from trimtab.models.lora import add_adapters, fill_adapters
from trimtab.models.packed import PackedModel, cast_parameters, has_dropout, switch_off_dropout
from trimtab.models.parallel.sharded_checkpoint import (
    ModelSource,
    begin_sharded_load,
    cast_frozen,
    fill_weights,
    resolve_path,
    set_head,
)
from trimtab.models.parallel.sharded_model import HeldModelOptions, TrainedModelOptions, shard_frozen, shard_trained
from trimtab.models.policy import Policy
from trimtab.models.pretrained import (
    WeightFiles,
    check_model_folder,
    fake_model,
    first_line,
    from_pretrained,
    has_random_weights,
    quiet_transformers,
    refuse_fresh_weights,
    weights_fingerprint,
)
from trimtab.models.reward import HEAD, AutoClassifier, RewardModel, drawn_head, initialise_head, separate_padding
from trimtab.models.selfcheck import Verdict, choose_path, choose_path_without_weights, needs_accelerator

RewardLoadOptions = RMOptions | RLOptions | GenerateOptions | AttackOptions | ServeRMOptions
"""Options with both LoadOptions and RewardHeadOptions."""
Wrap = Callable[[PackedModel], PackedModel]


@dataclass
class Loaded:
    """A loaded model and facts about it."""

    model: PackedModel
    verdict: Verdict
    weights: str  # fingerprint of the weights that were read
    notes: tuple[str, ...] = ()  # lines for the log


# ---- policies


def load_policy(
    options: HeldModelOptions, device: Device, mesh: Mesh | None = None, *, within: Wrap = lambda policy: policy
) -> Loaded:
    """A causal LM to train, sharded over the processes of `mesh`; `within`: wraps it in another root module."""
    mesh = mesh or Mesh()
    shard, direct = _reads_parts(options, mesh), mesh.size == 1 and options.lora_rank > 0
    source = _open_model(options.pretrain, options, device, "--pretrain", mesh if shard else None, direct=direct)
    return _trained(Policy, source, options, device, mesh, within)


def load_frozen_policy(
    pretrain: str,
    options: LoadOptions,
    device: Device,
    flag: str = "--ref_pretrain",
    *,
    mesh: Mesh | None = None,
    offload: bool = False,
) -> Loaded:
    """A frozen causal LM (reference or teacher) in the trained model's precision.

    `mesh`: the processes it is sharded over; None: not sharded. `offload`: shards are in main memory.
    """
    source = _open_model(pretrain, options, device, flag, mesh, direct=mesh is None)
    return _frozen(Policy, source, pretrain, options, device, flag, mesh, offload)


def wrap_policy(model: nn.Module, options: LearnerOptions, device: Device) -> Loaded:
    """A causal LM loaded by the caller, to train in place."""
    model = model.float()
    return _trained(Policy, ModelSource(model, weights_fingerprint(model)), options, device, Mesh())


def fake_policy(options: TrainedModelOptions) -> Policy:
    """The policy with adapters but without weights, to check options against."""
    model = fake_model(options.pretrain, AutoModelForCausalLM)
    return Policy(add_adapters(model, options) if options.lora_rank > 0 else model)


def fake_frozen_policy(pretrain: str, flag: str) -> Policy:
    """A frozen policy without weights."""
    return Policy(fake_model(pretrain, AutoModelForCausalLM, flag))


def fake_policy_with_fingerprint(pretrain: str, flag: str = "--pretrain") -> tuple[Policy, str]:
    """A fake policy that another engine will load, and the fingerprint of its weights."""
    check_model_folder(pretrain, flag)
    policy = fake_frozen_policy(pretrain, flag)
    with contextlib.suppress(UserError):  # not every model has one
        policy.inner.generation_config = from_pretrained(GenerationConfig, pretrain, flag=flag)
    files = WeightFiles.find(pretrain, flag)
    return policy, "other files" if files is None else files.fingerprint()


# ---- reward models and critics: sequence classifiers with one score


def load_reward_model(
    options: RMOptions | RLOptions,
    device: Device,
    tokenizer: Any,
    mesh: Mesh | None = None,
    *,
    root: type[PackedModel] = RewardModel,
) -> Loaded:
    """A reward model or critic to train, from a model with a score head or from a causal LM; sharded over `mesh`."""
    mesh = mesh or Mesh()
    shard = mesh if _reads_parts(options, mesh) else None
    source = _open_model(options.pretrain, options, device, "--pretrain", shard, scores=options)
    _require_head(source.model, options.pretrain)
    if source.files is None and source.fresh_head:
        initialise_head(source.model)
    separate_padding(source.model, tokenizer)
    return _trained(root, source, options, device, mesh)


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
    """A frozen reward model: ours, or any sequence classifier with one score. `mesh`, `offload`: as in
    `load_frozen_policy`."""
    source = _open_model(pretrain, options, device, flag, mesh, scores=options)
    if source.fresh_head:
        raise UserError(f"{flag} {pretrain}: a model without a trained score head; make one of it with trimtab rm")
    separate_padding(source.model, tokenizer)
    return _frozen(RewardModel, source, pretrain, options, device, flag, mesh, offload)


def fake_reward_model(options: TrainedModelOptions, flag: str = "--pretrain") -> RewardModel:
    """A reward model or critic without weights. `flag`: the option that names it."""
    model = fake_model(options.pretrain, AutoClassifier, flag, num_labels=1)
    _require_head(model, options.pretrain, flag)
    return RewardModel(add_adapters(model, options, "SEQ_CLS") if options.lora_rank > 0 else model)


def _require_head(model: nn.Module, pretrain: str, flag: str = "--pretrain") -> None:
    if not hasattr(model, HEAD):
        raise UserError(f"{flag} {pretrain}: {type(model).__name__} is not a decoder with a score head")


# ---- shared by both


def _reads_parts(options: HeldModelOptions, mesh: Mesh) -> bool:
    """Whether each process reads only its own shards of a trained model."""
    return mesh.size > 1 and (options.zero_stage > 0 or mesh.sizes["tensor"] > 1)


def _open_model(
    pretrain: str,
    options: LoadOptions,
    device: Device,
    flag: str,
    mesh: Mesh | None,
    *,
    direct: bool = False,
    scores: RewardLoadOptions | None = None,
) -> ModelSource:
    """A causal LM, or with `scores` a classifier: without weights, to be read in shards by the processes of `mesh`; or
    loaded whole, if there is no mesh or its files cannot be read in parts.

    `direct`: one process, too, reads a bf16 model directly in bf16. A frozen model needs no fp32 copy, which would take
    twice the memory and most of the time; a small fp32 model is self-checked instead.
    """
    check_model_folder(pretrain, flag)
    quiet_transformers()
    loader: Any = AutoModelForCausalLM
    head, more = None, dict[str, Any]()
    if scores is not None:
        config = from_pretrained(AutoConfig, pretrain, flag=flag)
        head = getattr(config, "value_head_prefix", scores.value_head_prefix)  # its name in the files
        loader, more = AutoClassifier, {"num_labels": 1}
    direct = direct and options.bf16 and not options.load_in_4bit and options.attn_implementation is None
    if mesh is not None or direct or has_random_weights(pretrain):
        source = begin_sharded_load(pretrain, loader, options, mesh or Mesh(), flag, head=head, **more)
        # If Hugging Face's loader converts weights, it rounds at other points, so one process uses it as before.
        if source is not None and (mesh is not None or source.keys is not None):
            return source
    if head not in (None, HEAD):
        more["key_mapping"] = {rf"^{head}\.": f"{HEAD}."}
    return _load_whole(loader, pretrain, options, device, flag, **more)


def _load_whole(
    loader: Any, pretrain: str, options: LoadOptions, device: Device, flag: str, **more: Any
) -> ModelSource:
    # A mismatched shape is reported by us, with the weight's name.
    arguments = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if options.attn_implementation is not None:
        arguments["attn_implementation"] = options.attn_implementation
    if options.load_in_4bit:
        arguments |= {"quantization_config": _four_bit(), "dtype": torch.bfloat16, "device_map": {"": device.torch}}
    model, found = from_pretrained(loader, pretrain, flag=flag, **arguments, **more)
    lacking = {*found["missing_keys"], *(key[0] for key in found["mismatched_keys"])}
    return ModelSource(model, found=found, fresh_head=f"{HEAD}.weight" in lacking)


def _trained(
    root: type[PackedModel],
    source: ModelSource,
    options: HeldModelOptions,
    device: Device,
    mesh: Mesh,
    within: Wrap = lambda module: module,
) -> Loaded:
    """The root module of a model to train: choose its attention path in fp32, then cast, shard and, if it has no
    weights yet, read them."""
    model, whole, scores = source.model, source.files is None, root is not Policy
    if whole:
        _refuse_fresh(source.found, options.pretrain, "--pretrain", scores=scores)
    head = drawn_head(model) if not whole and scores and source.fresh_head else None
    weights = source.weights or _fingerprint(model, options.pretrain, options, "--pretrain")
    notes = _settle_dropout(model, options) if isinstance(options, DropoutOptions) else ()
    if whole and _reads_parts(options, mesh):
        why = "its weights cannot be read in parts (safetensors can), so every process reads them all and then splits"
        notes += (f"note: --pretrain {options.pretrain}: {why} them",)
    if options.load_in_4bit:
        _keep_gradients_on_cpu(model)
    random_state = torch.get_rng_state()
    if options.lora_rank > 0:
        model = add_adapters(model, options, "SEQ_CLS" if scores else "CAUSAL_LM")
    module = root(model)
    if whole:
        verdict = _place(module, options, device, cast=options.bf16 and mesh.size == 1)
    else:
        verdict = resolve_path(module, options, device)
    prepare_training(module, options, device)
    module = within(module)
    if options.bf16 and mesh.size > 1:
        cast_frozen(module)
    elif options.bf16 and not whole:
        cast_parameters(module, torch.bfloat16)
    shard_trained(module, options, mesh)
    if not whole:
        found = fill_weights(module, source, device.torch, offload=options.adam_offload)
        _refuse_fresh(found, options.pretrain, "--pretrain", scores=scores)
        if scores:
            set_head(module, head)
        if options.lora_rank > 0:
            after = fill_adapters(module.model, random_state)
            if mesh.size == 1:  # the same random state as after drawing them in a loaded model
                torch.set_rng_state(after)
    fuse_if_exact(module, options, device, mesh)
    return Loaded(module, verdict, weights, notes)


def _frozen(
    root: type[PackedModel],
    source: ModelSource,
    pretrain: str,
    options: LoadOptions,
    device: Device,
    flag: str,
    mesh: Mesh | None,
    offload: bool,
) -> Loaded:
    """The root module of a frozen model."""
    model, whole = source.model, source.files is None
    if whole:
        _refuse_fresh(source.found, pretrain, flag)
    weights = source.weights or _fingerprint(model, pretrain, options, flag)
    module = root(model.requires_grad_(False)).eval()
    if root is RewardModel and not hasattr(model, HEAD):
        # Only its own forward pass knows how the score is computed.
        verdict = Verdict("logits", f"{type(model).__name__} is not a decoder", 0.0)
        module.path, module.not_packed = verdict.path, verdict.reason
        if whole:
            module.to(device.torch)
    else:
        verdict = _place(module, options, device, cast=options.bf16) if whole else resolve_path(module, options, device)
    if options.bf16:
        cast_parameters(module, torch.bfloat16)
    if mesh is not None:
        shard_frozen(module, mesh, offload=offload)
    if not whole:
        _refuse_fresh(fill_weights(module, source, device.torch, offload=offload), pretrain, flag)
    if not offload and isinstance(options, ModelOptions):
        fuse_if_exact(module, options, device, mesh or Mesh())
    return Loaded(module, verdict, weights)


def fuse_if_exact(module: PackedModel, options: ModelOptions, device: Device, mesh: Mesh) -> None:
    """Apply --exact. UserError: it is on, and this trained model or these options are not supported."""
    hindrance = "--compile on" if options.compile == "on" else options.not_compiled
    if options.gradient_checkpointing and options.gradient_checkpointing_keep != "nothing":
        hindrance = "--gradient_checkpointing_keep"
    if getattr(options, "aux_loss_coef", 0.0) > 0:
        hindrance = "--aux_loss_coef"
    if getattr(options, "weight_only_int8", False):
        hindrance = "--weight_only_int8"
    if mesh.sizes["tensor"] > 1 or mesh.sizes["context"] > 1:
        hindrance = "--ds_tensor_parallel_size or --ring_attn_size"
    if options.exact == "off":
        module.not_exact = "--exact off"
    elif hindrance:
        module.not_exact = f"not with {hindrance}"
    else:
        module.not_exact = fuse_layers(module, device.torch, bf16=options.bf16)
        reshard_model(module)
        if mesh.size > 1 and mesh.all.any(bool(module.not_exact)) and not module.not_exact:
            unfuse_layers(module)
            module.not_exact = "the kernels fail their check in another process"
    if module.not_exact and options.exact == "on" and any(weight.requires_grad for weight in module.parameters()):
        raise UserError(f"--exact on: {module.not_exact}; leave it out")


def _refuse_fresh(found: dict[str, set], pretrain: str, flag: str, *, scores: bool = False) -> None:
    """Refuse files without some of the weights; `scores`: a score head may be missing."""
    if scores:
        found = {key: {k for k in keys if HEAD not in str(k)} for key, keys in found.items()}
    refuse_fresh_weights(pretrain, found, flag=flag)


def _fingerprint(model: nn.Module, pretrain: str, options: LoadOptions, flag: str) -> str:
    """Fingerprint of the safetensors files, or of the parameters if there are none."""
    files = None if options.load_in_4bit else WeightFiles.find(pretrain, flag)
    return weights_fingerprint(model) if files is None else files.fingerprint()


def _settle_dropout(model: nn.Module, options: DropoutOptions) -> tuple[str, ...]:
    """Switch off the model's dropout unless --keep_dropout; called before adapters add their own. Returns notes."""
    if options.keep_dropout:
        return () if has_dropout(model) else ("--keep_dropout has no effect: the model has no dropout",)
    if not switch_off_dropout(model):
        return ()
    return ("the model's own dropout is off, as it is in what updates are compared with; --keep_dropout keeps it",)


def _place(module: PackedModel, options: LoadOptions, device: Device, *, cast: bool) -> Verdict:
    """Choose the path, cast and move to the device, in this order: the comparison needs fp32."""
    verdict = None
    if options.attn_implementation is None and device.is_accelerator and needs_accelerator(module.inner):
        how = {"dtype": torch.bfloat16, "device": device.torch}  # a small model, since fp32 weights may not fit there
        verdict = choose_path_without_weights(module, packed_allowed=True, **how)
    elif options.attn_implementation is None:
        verdict = choose_path(module)
    if cast:
        cast_parameters(module, torch.bfloat16)
    module.to(device.torch)
    # An implementation named by the user may support only half precision, or only the accelerator.
    return verdict or choose_path(module, packed_allowed=False)


def prepare_training(module: PackedModel, options: HeldModelOptions, device: Device) -> None:
    """Apply the options' kernels and memory savers, and switch to train mode."""
    if options.use_liger_kernel:
        _apply_liger(module.model, device)
    enable_gradient_checkpointing(module, options)
    if options.offload_activations and device.is_accelerator:
        module.activations = ActivationOffload(module)
    module.train()


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


def _keep_gradients_on_cpu(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking weights on some CPUs in eval mode: they would have no gradient afterwards."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _four_bit() -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # advice about kernels for inference
    try:
        import bitsandbytes  # noqa: F401
        from transformers import BitsAndBytesConfig
    except Exception as error:  # a broken installation may raise anything
        raise UserError(f"--load_in_4bit: bitsandbytes does not work here ({first_line(error)}); drop it") from error
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
