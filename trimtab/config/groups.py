"""Every option, written once: a field with its type, its default and, under it, its help text.

A group holds the options that the same set of jobs shares; its docstring is their heading in `--help`. Jobs (jobs.py)
inherit the groups they need and may change a default. Names and meanings follow OpenRLHF v0.7 to v0.8; where those
versions disagree v0.8.5 decides. Options that say what is learnt (losses, heads, references) are in objectives.py.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar


def of_this_call(default: Any) -> Any:
    """An option about this call, not about the run: not in the resolved config, and equal runs may differ in it."""
    return field(default=default, compare=False, metadata={"of_this_call": True})


def secret(default: Any, bare: str | None = None) -> Any:
    """An option whose value may be a key, shown nowhere; standing alone, or true in YAML, it has the value `bare`."""
    return field(default=default, repr=False, metadata={"secret": True, "bare": bare})


def required(shown: str, what: str) -> Any:
    """An option without which its job cannot start: `shown` stands for its value in the usage line, `what` says in
    words what to give. In Python it is None until it is set."""
    return field(default=None, metadata={"required": (shown, what)})


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """Run"""

    verb: ClassVar[str]
    trainer: ClassVar[str]
    """The module of trimtab.train that does the job, where it is a training job."""

    config: str | None = of_this_call(None)
    """YAML file of options under these same names; what the command line says wins."""
    dry_run: bool = of_this_call(False)
    """Check everything that needs no training, print the resolved config and stop."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(CallOptions):
    """Run"""

    seed: int = 42
    """Seed of every random choice: data order, dropout, fresh weights."""
    full_determinism: bool = False
    """Deterministic kernels only, so that two runs on one accelerator agree bit for bit."""


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Model"""

    bf16: bool = False
    """bfloat16 weights; in training the optimiser keeps float32 masters of them."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions(PrecisionOptions):
    """Model"""

    load_in_4bit: bool = False
    """Quantise the frozen base to 4-bit NF4 (QLoRA). Needs --bf16, and in training --lora_rank."""
    flash_attn: bool = False
    """The best exact attention this device has; no package is needed for it."""
    attn_implementation: str | None = None
    """Attention of this Hugging Face name instead, for example sdpa, eager or flash_attention_2."""
    disable_fast_tokenizer: bool = False
    """Use the tokenizer written in Python instead of the Rust one."""
    use_ms: bool = False
    """Fetch models and data from ModelScope instead of the Hugging Face hub."""


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(LoadOptions):
    """Model"""

    pretrain: str | None = required("MODEL", "a hub name or a model folder")
    """Model to start from: a hub name or a local folder."""


@dataclass(frozen=True, kw_only=True)
class BackwardOptions:
    """Model"""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    gradient_checkpointing_use_reentrant: bool = False
    """The reentrant form of gradient checkpointing."""
    use_liger_kernel: bool = False
    """Fused Liger kernels (needs the liger-kernel package)."""
    aux_loss_coef: float = 0.0
    """Weight of the router balancing loss of a mixture of experts; 0 leaves it out."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions(PretrainOptions, BackwardOptions):
    """Model"""


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """LoRA"""

    lora_rank: int = 0
    """Rank of the adapters; above 0 only adapters are trained, and --save_path holds the adapter."""
    lora_alpha: int = 16
    """The adapters' output is scaled by alpha / rank."""
    lora_dropout: float = 0.0
    """Dropout before the adapters."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Names of the modules that get adapters."""


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """Optimiser"""

    lr_scheduler: str = "cosine_with_min_lr"
    """Hugging Face name of the schedule."""
    lr_warmup_ratio: float = 0.03
    """Share of all steps in which the learning rate rises."""
    min_lr_ratio: float = 0.1
    """Floor of cosine_with_min_lr, as a share of the peak."""
    l2: float = 0.0
    """Weight decay; biases and norms are left out."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Decay of Adam's two averages."""
    max_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 means no clipping."""


@dataclass(frozen=True, kw_only=True)
class OptimiserOptions(UpdateOptions):
    """Optimiser"""

    learning_rate: float = 5e-6
    """Peak learning rate."""


@dataclass(frozen=True, kw_only=True)
class PackingOptions:
    """Batches"""

    packing_samples: bool = False
    """Pack samples into rows of a token budget instead of padding them; samples never see each other."""


@dataclass(frozen=True, kw_only=True)
class BatchOptions(PackingOptions):
    """Batches"""

    train_batch_size: int = 128
    """Samples in one optimiser step, over all processes."""
    micro_train_batch_size: int = 8
    """Samples in one forward and backward pass; it changes memory and speed, not the result."""
    max_epochs: int = 1
    """Passes over the data; in RL over the rollouts of each iteration."""
    train_max_tokens_per_gpu: int | None = None
    """Token budget of a packed pass; unset: micro_train_batch_size samples of full length."""
    fit_memory: bool | None = None
    """Choose the token budget of a pass from the device's memory (see trimtab plan); unset: on an accelerator, where
    no option above or of the like says how large a pass is."""


@dataclass(frozen=True, kw_only=True)
class CountOptions:
    """Data"""

    max_samples: int = 1_000_000
    """At most this many rows are used."""


@dataclass(frozen=True, kw_only=True)
class RowOptions(CountOptions):
    """Data"""

    eval_dataset: str | None = None
    """Data for evaluation; unset: the training source's test split, if it has one (RL: none)."""
    eval_split: str = "train"
    """Split of --eval_dataset."""
    num_workers: int | None = None
    """Processes that tokenise; unset: one per core, at most 8."""


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """Data"""

    max_len: int = 2048
    """At most this many tokens in a sample, prompt and answer together."""


@dataclass(frozen=True, kw_only=True)
class PromptLengthOptions:
    """Data"""

    prompt_max_len: int = 1024
    """At most this many tokens in a prompt; rows with longer ones are left out, and counted."""


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Data"""

    dataset: str | None = required("DATA", "a file, a folder or a hub name")
    """Hub names, files (json, jsonl, csv, parquet, arrow, .py) or folders, separated by commas; type@folder for the
    files of one type in a folder."""
    dataset_probs: str | None = None
    """Share of each source, separated by commas; unset: the sources are concatenated."""
    dataset_split: str = "train"
    """Split to use."""


@dataclass(frozen=True, kw_only=True)
class DataOptions(SourceOptions, RowOptions, LengthOptions):
    """Data"""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling"""

    temperature: float = 1.0
    """Temperature of sampling; in RL the trained log-probabilities are taken at the same one."""
    top_p: float = 1.0
    """Draw among the most likely tokens that together have this probability."""


@dataclass(frozen=True, kw_only=True)
class PrefixOptions:
    """vLLM"""

    enable_prefix_caching: bool = False
    """Read a prompt once for all its answers; that is how it is always done here."""


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """Conversations"""

    input_template: str | None = None
    """Text with {} where the prompt goes, used when no chat template is; None switches it off."""
    apply_chat_template: bool = False
    """Render conversations with the tokenizer's chat template; a plain string becomes one user turn."""
    tokenizer_chat_template: str | None = None
    """Jinja chat template, or a file that holds one, to use instead of the tokenizer's own."""


@dataclass(frozen=True, kw_only=True)
class InputColumn:
    """Conversations"""

    input_key: str = "input"
    """Column that holds the prompt, the messages or the text."""


@dataclass(frozen=True, kw_only=True)
class OutputColumn:
    """Conversations"""

    output_key: str | None = None
    """Column that holds the answer; unset: the answer is the last turn of the input."""


@dataclass(frozen=True, kw_only=True)
class ConversationOptions(InputColumn, OutputColumn, TemplateOptions):
    """Conversations"""


@dataclass(frozen=True, kw_only=True)
class LabelColumn:
    """Conversations"""

    label_key: str = "label"
    """Column that holds the judgement: of a whole answer 1 or 0, of an answer in steps a list with one label a
    step."""


@dataclass(frozen=True, kw_only=True)
class PreferenceColumns:
    """Conversations"""

    prompt_key: str | None = None
    """Column that holds the prompt both answers share; unset: each answer column holds the whole conversation."""
    chosen_key: str = "chosen"
    """Column that holds the preferred answer or conversation."""
    rejected_key: str = "rejected"
    """Column that holds the other one."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Checkpoints"""

    save_path: str = "./ckpt"
    """Folder of the final model, in Hugging Face form."""
    save_steps: int = -1
    """Checkpoint every so many optimiser steps (RL: iterations); -1: never."""
    ckpt_path: str = "./ckpt/checkpoints"
    """Folder of the checkpoints a run resumes from."""
    load_checkpoint: bool = False
    """Go on from the newest checkpoint in --ckpt_path, if there is one."""
    max_ckpt_num: int = 3
    """Keep at most this many checkpoints."""
    max_ckpt_mem: int = 100_000_000
    """Keep at most this many gigabytes of checkpoints."""
    save_hf_ckpt: bool = False
    """At every checkpoint also save the model in Hugging Face form."""
    disable_ds_ckpt: bool = False
    """Save no resumable state at --save_steps (for use with --save_hf_ckpt)."""
    use_ds_universal_ckpt: bool = False
    """DeepSpeed's universal checkpoints. Refused: ours need no conversion."""


@dataclass(frozen=True, kw_only=True)
class LoggingOptions:
    """Logging and evaluation"""

    logging_steps: int = 1
    """Show and send metrics every so many optimiser steps (RL: iterations); metrics.jsonl has every one."""
    eval_steps: int = -1
    """Evaluate every so many optimiser steps (RL: iterations); -1: after each epoch (RL: at the start and the end)."""
    use_wandb: str | None = secret(None, bare="True")
    """Send metrics to wandb: True (after `wandb login`), online, offline, or an API key."""
    wandb_org: str | None = None
    """wandb entity."""
    wandb_group: str | None = None
    """wandb group."""
    wandb_project: str = "trimtab"
    """wandb project."""
    wandb_run_name: str | None = None
    """Name of the run in wandb, and of its folder in TensorBoard and VisualDL; unset: the job and the time."""
    use_tensorboard: str | None = None
    """Folder for TensorBoard files."""
    use_visualdl: str | None = None
    """Folder for VisualDL files (needs the visualdl package)."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(LoggingOptions):
    """Logging and evaluation"""

    report_samples: int = 0
    """After the run let the model before and the model after it answer this many prompts, and show them in the
    report."""


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """Processes and sharding"""

    nproc: int = of_this_call(1)
    """Start this many processes on this machine, which work together. (torchrun and deepspeed work too.)"""
    local_rank: int = of_this_call(-1)
    """Set by launchers."""
    zero_stage: int = 2
    """What is split over processes in training: 0 nothing, 1 and 2 optimiser and gradients, 3 weights too."""


@dataclass(frozen=True, kw_only=True)
class ShardingOptions(ProcessOptions):
    """Processes and sharding"""

    adam_offload: bool = False
    """Keep the optimiser's state in main memory and step there."""
    grad_accum_dtype: str | None = None
    """Type of accumulated gradients: fp32 or bf16; unset: fp32."""
    overlap_comm: bool = False
    """Exchange gradients while the backward pass goes on; that is how it is always done here."""
    zpg: int = 1
    """Size of ZeRO++'s second partition. Not implemented yet."""
    ds_tensor_parallel_size: int = 1
    """Tensor parallel size in training. Not implemented yet."""
    ring_attn_size: int = 1
    """Processes that share one sequence (ring attention). Not implemented yet."""
    ring_head_stride: int = 1
    """Heads in one step of the ring. Not implemented yet."""
    deepcompile: bool = False
    """DeepSpeed's DeepCompile. Not implemented."""
