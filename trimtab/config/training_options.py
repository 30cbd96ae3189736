"""Options that training jobs share: model, LoRA, optimiser, batches, checkpoints, logging, processes.

Every option is written once: a field with its type, its default and, under it, its help text. A group holds the options
that the same set of jobs shares; its docstring is their heading in `--help`. Bounds and choices stand in the field
(option.py), what options say together in the group's `check`. Jobs (jobs.py) inherit the groups they need and change
defaults. Names and meanings follow OpenRLHF v0.7 to v0.8; where those versions disagree v0.8.5 decides.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import field
from typing import Any, ClassVar, Literal

from trimtab.config.data_options import listed
from trimtab.config.option import Options, every, of_this_call, option, required, secret
from trimtab.errors import UserError

SCHEDULERS = (
    *("linear", "cosine", "cosine_with_min_lr", "cosine_with_restarts", "polynomial"),
    *("constant", "constant_with_warmup", "inverse_sqrt"),
)
# Who says how large a pass is does not want it chosen.
SAMPLES_IN_A_PASS = {
    *("micro_train_batch_size", "micro_rollout_batch_size"),
    *("micro_logprob_batch_size", "micro_reward_batch_size", "micro_value_batch_size"),
}
PASS_SIZES = SAMPLES_IN_A_PASS | {"train_max_tokens_per_gpu", "use_dynamic_batch"}

Origin = tuple[str, str, int | None]  # an option, the word of a file that sets it, and its line, if the file has it


class CallOptions(Options):
    """Run"""

    verb: ClassVar[str]
    trainer: ClassVar[str] = "supervised"
    """The module of trimtab.train that does the job, where it is a training job."""
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False, metadata={"no_option": True})
    """What there is to say about how the options were read."""
    origins: tuple[Origin, ...] = field(default=(), compare=False, repr=False, metadata={"no_option": True})
    """Of options that a file in other words has set."""

    def __init_subclass__(cls, verb: str | None = None, **defaults: Any) -> None:
        """`verb` makes the class a job of that name."""
        if verb is not None:
            cls.verb = verb
            if hasattr(cls, "wandb_project"):
                defaults["wandb_project"] = f"trimtab_train_{verb}"
        super().__init_subclass__(**defaults)

    config: str | None = of_this_call(None)
    """YAML file of options under these same names, or for `trimtab rl` one of PaddleNLP's; what the command line says
    wins."""
    dry_run: bool = of_this_call(False)
    """Print the resolved config and stop. Training jobs first try all that needs no training (the reward too), and
    tell a sample with its loss mask, the steps and the memory of the run."""


class RunOptions(CallOptions):
    """Run"""

    seed: int = option(42, at_least=0)
    """Seed of every random choice: data order, dropout, fresh weights."""
    full_determinism: bool = False
    """Deterministic kernels only, so that two runs on one accelerator agree bit for bit."""


class PrecisionOptions(Options):
    """Model"""

    bf16: bool = False
    """bfloat16 weights; in training the optimiser keeps float32 masters of them."""
    trust_remote_code: bool = False
    """Run the Python code that comes with a model or its tokenizer. Without this it is never run."""

    def check(self) -> Iterable[str]:
        return ["--trust_remote_code: Python code that comes with the models is run"] if self.trust_remote_code else []


class LoadOptions(PrecisionOptions):
    """Model"""

    load_in_4bit: bool = False
    """Quantise the frozen base to 4-bit NF4 (QLoRA). Needs --bf16, and in training --lora_rank."""
    flash_attn: bool = option(False, always=True)
    """The best exact attention this device has; no package is needed for it, and it is what is always used here."""
    attn_implementation: str | None = None
    """Attention of this Hugging Face name instead, for example sdpa, eager or flash_attention_2."""
    disable_fast_tokenizer: bool = False
    """Use the tokenizer written in Python instead of the Rust one."""
    use_ms: bool = option(
        False, refused="(ModelScope) is not implemented; fetch model and data with modelscope and give their folders"
    )
    """Fetch models and data from ModelScope instead of the Hugging Face hub. Not implemented."""

    def check(self) -> Iterable[str]:
        if self.load_in_4bit and not self.bf16:
            raise UserError("--load_in_4bit computes in bfloat16: add --bf16")
        return ()


class PretrainOptions(LoadOptions):
    """Model"""

    pretrain: str = required("MODEL", "a hub name or a model folder", place="model")
    """Model to start from: a hub name or a local folder."""


class BackwardOptions(Options):
    """Model"""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    gradient_checkpointing_use_reentrant: bool = option(False, needs="gradient_checkpointing")
    """The reentrant form of gradient checkpointing."""
    gradient_checkpointing_layers: int | Literal["auto"] | None = option(
        None, at_least=1, needs="gradient_checkpointing"
    )
    """How many of the layers recompute, evenly spread; the others keep everything. auto: as few as the device's memory
    asks for, by plan (see trimtab plan). Unset: all recompute."""
    gradient_checkpointing_keep: str = option(
        "nothing", choices=("nothing", "attention", "products"), needs="gradient_checkpointing"
    )
    """What layers that recompute keep all the same: nothing but their input, what attention gave, or what attention and
    every matrix product gave. More kept is less computed again."""
    offload_activations: bool = False
    """Keep in main memory what the backward pass needs of the forward pass. Needs --gradient_checkpointing."""
    compile: str = option("auto", choices=("auto", "on", "off"))
    """Compile the layers of training and scoring passes, which are faster then but take seconds at the start: on, off,
    or auto: on an accelerator, in a run that is long enough. A resumed run does what it did before."""
    exact: str = option("auto", choices=("auto", "on", "off"))
    """Train and sample with the same kernels in bf16, so that the log-prob of a sampled token is the trainer's bit for
    bit (docs/exact.md): on, off, or auto: for models and devices that have them. They take the place of --compile."""
    use_liger_kernel: bool = False
    """Fused Liger kernels (needs the liger-kernel package); in place of --compile."""
    aux_loss_coef: float = option(0.0, at_least=0)
    """Weight of the router balancing loss of a mixture of experts; 0 leaves it out."""

    @property
    def plans_recomputation(self) -> bool:
        """Whether a plan says how many layers recompute."""
        return self.gradient_checkpointing and self.gradient_checkpointing_layers == "auto"


class ModelOptions(PretrainOptions, BackwardOptions):
    """Model"""

    def check(self) -> Iterable[str]:
        if self.compile == "on":
            self._check_compile()
        if self.aux_loss_coef > 0 and self.gradient_checkpointing_use_reentrant:
            raise UserError("--aux_loss_coef gets no gradient through reentrant checkpointing: leave that variant out")
        chosen = {"gradient_checkpointing_layers": None, "gradient_checkpointing_keep": "nothing"}
        chosen = {name: value for name, value in chosen.items() if getattr(self, name) != value}
        for name in [*chosen, *(["offload_activations"] if self.offload_activations else [])]:
            if self.gradient_checkpointing_use_reentrant:
                raise UserError(f"--{name} does not work with --gradient_checkpointing_use_reentrant: leave that out")
        if self.offload_activations and not self.gradient_checkpointing:
            raise UserError("--offload_activations needs --gradient_checkpointing: add it")
        if self.offload_activations and chosen:
            raise UserError(
                f"--offload_activations takes what layers keep that all recompute: leave --{next(iter(chosen))} out"
            )
        return ()

    def _check_compile(self) -> None:
        if (instead := self.not_compiled) is not None:
            raise UserError(f"--compile on does not work with {instead}: leave one of them out")

    @property
    def not_compiled(self) -> str | None:
        """The option with which layers cannot be compiled, if there is one."""
        if self.use_liger_kernel:
            return "--use_liger_kernel"
        if self.gradient_checkpointing and self.gradient_checkpointing_keep == "products":
            return "--gradient_checkpointing_keep products"
        return "--load_in_4bit" if self.load_in_4bit else None


class LoraOptions(Options):
    """LoRA"""

    lora_rank: int = option(0, at_least=0)
    """Rank of the adapters; above 0 only adapters are trained, and --save_path holds the adapter."""
    lora_alpha: int = option(16, at_least=1)
    """The adapters' output is scaled by alpha / rank."""
    lora_dropout: float = option(0.0, at_least=0, below=1)
    """Dropout before the adapters."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Names of the modules that get adapters; all-linear: linear layers and experts, but not the LM head."""

    @property
    def adapts(self) -> bool:
        """Whether any model gets adapters."""
        return self.lora_rank > 0

    def check(self) -> Iterable[str]:
        if isinstance(self, LoadOptions) and self.load_in_4bit and not self.lora_rank:
            raise UserError("--load_in_4bit freezes the base model: add --lora_rank, for example --lora_rank 16")
        if self.adapts:
            return ()
        return self.idle(("lora_alpha", "lora_dropout", "target_modules"), "without --lora_rank")


class DropoutOptions(Options):
    """Model"""

    keep_dropout: bool = False
    """Keep the model's own dropout in updates. It is off by default, because what they are compared with is scored
    without it; --lora_dropout is not touched."""


class UpdateOptions(Options):
    """Optimiser"""

    optimizer: str = option("adamw", choices=("adamw", "muon"))
    """adamw; or muon for the matrices of the layers (also those of LoRA), and adamw for embeddings, heads, norms and
    stacked experts."""
    muon_momentum: float = option(0.95, at_least=0, below=1, needs=("optimizer", "muon"))
    """Decay of Muon's average of gradients."""
    muon_scale: str = option("match_rms_adamw", choices=("match_rms_adamw", "original"), needs=("optimizer", "muon"))
    """How Muon's updates are scaled: match_rms_adamw makes them as large as AdamW's, so that one learning rate and one
    weight decay fit both; original by the square root of rows / columns, if that is more than 1."""
    lr_scheduler: str = option("cosine_with_min_lr", choices=SCHEDULERS)
    """Hugging Face name of the schedule."""
    lr_warmup_ratio: float = option(0.03, at_least=0, at_most=1)
    """Share of all steps in which the learning rate rises, from the first step on; a run with fewer than 1 over this
    share has no warm-up."""
    min_lr_ratio: float = option(0.1, at_least=0, at_most=1, needs=("lr_scheduler", "cosine_with_min_lr"))
    """Floor of cosine_with_min_lr, as a share of the peak."""
    l2: float = option(0.0, at_least=0)
    """Weight decay; biases and norms are left out."""
    adam_betas: tuple[float, float] = option((0.9, 0.95), at_least=0, below=1)
    """Decay of Adam's two averages."""
    adam_eps: float = option(1e-8, above=0)
    """What Adam adds to the root of the second average before it divides by it."""
    max_norm: float = option(1.0, at_least=0)
    """Gradients are scaled down to this norm; 0 means no clipping."""

    def check(self) -> Iterable[str]:
        if self.lr_scheduler == "constant" and self.lr_warmup_ratio:
            return self.idle(["lr_warmup_ratio"], "with --lr_scheduler constant: use constant_with_warmup")
        return ()


class OptimiserOptions(UpdateOptions):
    """Optimiser"""

    learning_rate: float = option(5e-6, at_least=0)
    """Peak learning rate."""


class PackingOptions(Options):
    """Batches"""

    packing_samples: bool = False
    """Pack samples into rows of a token budget instead of padding them; samples never see each other."""


PER_DEVICE = frozenset({"per_device_train_batch_size", "gradient_accumulation_steps"})
"""Words of tools in which a step is as large as its parts together."""


class BatchOptions(PackingOptions):
    """Batches"""

    train_batch_size: int = option(128, at_least=1)
    """Samples in one optimiser step, over all processes."""
    micro_train_batch_size: int = option(8, at_least=1)
    """Samples in one forward and backward pass; it changes memory and speed, not the result. Where no option says how
    large a pass is, it has a number of tokens: on a CPU 2048, or one sample if that may have more; on an accelerator
    see --fit_memory."""
    max_epochs: int = option(1, at_least=1)
    """Passes over the data; in RL over the rollouts of each iteration."""
    max_steps: int = every(-1)
    """Stop after this many optimiser steps (RL: iterations) if the data give more, with a schedule that fits them; -1:
    no limit."""
    gradient_accumulation_steps: int | None = of_this_call(None, above=0)
    """Passes of a process in a step, where --train_batch_size is not given: the step is then the samples of a pass
    times these times the processes, as in transformers."""
    train_max_tokens_per_gpu: int | None = None
    """Tokens that a process has in a packed pass; unset: micro_train_batch_size samples of full length. A row that
    --ring_attn_size splits holds that many times as many."""
    fit_memory: bool | None = None
    """Choose the token budget of a pass from the device's memory (see trimtab plan); unset: on an accelerator, where
    no option above or of the like says how large a pass is."""

    def settle(self, changes: dict[str, Any]) -> Iterable[str]:
        if self.fit_memory is None and self.given & PASS_SIZES:
            changes["fit_memory"] = False
        if not self.given & PER_DEVICE:
            return ()
        micro, passes = self.micro_train_batch_size, self.gradient_accumulation_steps or 1
        if "train_batch_size" in self.given:
            return [f"a step stays {self.train_batch_size} samples, as --train_batch_size says; a pass takes {micro}"]
        processes = 1
        if isinstance(self, ProcessOptions):
            processes = self.data_parts(int(os.environ.get("WORLD_SIZE", self.processes)))
        step = changes["train_batch_size"] = micro * passes * processes
        return [f"a step is {step} samples: {micro} in a pass x {passes} passes x {processes} processes"]

    @property
    def token_budget_option(self) -> str | None:
        """The option, if any, by which passes are cut by tokens and not by number."""
        budgeted = self.packing_samples and self.train_max_tokens_per_gpu is not None
        return "train_max_tokens_per_gpu" if budgeted else None

    def check(self) -> Iterable[str]:
        if self.fit_memory:
            yield from self.idle(sorted(PASS_SIZES), "beside --fit_memory, which chooses the passes")
        elif self.token_budget_option:
            why = f"beside --{self.token_budget_option}: passes are cut by tokens"
            yield from self.idle(sorted(SAMPLES_IN_A_PASS), why)
        whole, micro = self.train_batch_size, self.micro_train_batch_size
        if whole % micro and not self.token_budget_option:
            divisor = max(number for number in range(1, min(micro, whole) + 1) if whole % number == 0)
            other = "" if whole < micro else f", or --train_batch_size {whole - whole % micro}"
            raise UserError(
                f"--train_batch_size {whole} is not a multiple of --micro_train_batch_size {micro}: "
                f"use --micro_train_batch_size {divisor}{other}"
            )


class SamplingOptions(Options):
    """Sampling"""

    temperature: float = option(1.0, at_least=0)
    """Temperature of sampling; in RL the trained log-probabilities are taken at the same one."""
    top_p: float = option(1.0, above=0, at_most=1)
    """Draw among the most likely tokens that together have this probability."""
    repetition_penalty: float = option(1.0, above=0)
    """Tokens that were there before are made less likely by this factor; 1: not."""


class PrefixOptions(Options):
    """vLLM"""

    rollout_engine: str | None = option(None, choices=("builtin", "vllm"))
    """What writes the answers: builtin, with the model's own weights in place, or vllm, with a copy of them; unset:
    vllm with --ray and --vllm_num_engines above 0, else builtin. vllm without --ray is in the process that asks."""
    enable_prefix_caching: bool = option(False, always=True)
    """Read a prompt once for all its answers; the built-in engine always does."""


def checkpoints_in(save_path: str) -> str:
    """The default folder of a run's checkpoints."""
    return os.path.join(save_path, "checkpoints")


CHECKS = {
    "data": "labels are complete, rows and tokens belong together, evaluation prompts are held out",
    "rendering": "the loss mask covers whole answers and their end, and nothing is doubled",
    "reward": "it answers, differs between answers, and verifiers accept the label",
    "update": "every trained tensor gets a gradient and moves, every frozen one stays",
    "micro_batches": "one batch in 1, 2 and more micro-batches has the same gradient",
    "neighbours": "samples in a packed row do not see each other",
    "objective": "better answers get higher advantages, groups are compared within themselves, KL pulls back",
    "engine": "new weights reach the engine, and the reference keeps the old ones",
    "checkpoint": "a checkpoint reads back bit for bit and gives the same next step",
    "export": "the saved model loads in plain transformers with the same log-probs",
}
"""The checks before the first step, by name (train/proof.py)."""


class ProofOptions(Options):
    """Checks before the first step"""

    skip_checks: str | None = of_this_call(None)
    """Checks to leave out, separated by commas, or all: data, rendering, reward, update, micro_batches, neighbours,
    objective, engine, checkpoint, export."""
    check_only: bool = of_this_call(False)
    """Load the model, run every check and stop, as `trimtab check VERB` does; nothing is trained or written."""

    def wants_check(self, name: str) -> bool:
        """Whether this check is wanted."""
        return not {name, "all"} & set(listed(self.skip_checks))

    def check(self) -> Iterable[str]:
        if unknown := sorted(set(listed(self.skip_checks)) - {*CHECKS, "all"}):
            raise UserError(f"--skip_checks {unknown[0]}: no such check; there are {', '.join(CHECKS)}, or all")
        return ()


class CheckpointOptions(ProofOptions):
    """Checkpoints"""

    save_path: str = "./ckpt"
    """Folder of the final model, in Hugging Face form."""
    save_steps: int = every(-1)
    """Checkpoint every N optimiser steps (RL: iterations); -1: never."""
    overwrite: bool = of_this_call(False)
    """Replace a finished run in --save_path; without this it is set aside, as NAME.old-1."""
    ckpt_path: str | None = None
    """Folder of the checkpoints a run resumes from; unset: checkpoints in --save_path."""
    load_checkpoint: bool = False
    """Go on from the newest checkpoint in --ckpt_path, if there is one."""
    max_ckpt_num: int = option(3, at_least=1)
    """Keep at most this many checkpoints."""
    max_ckpt_mem: int = option(100_000_000, at_least=1)
    """Keep at most this many gigabytes of checkpoints."""
    save_hf_ckpt: bool = False
    """At every checkpoint also save the model in Hugging Face form."""
    disable_ds_ckpt: bool = False
    """Save no resumable state at --save_steps (for use with --save_hf_ckpt)."""
    push_to_hub: str | None = of_this_call(None)
    """Upload the trained model or adapter with a model card to this repository of the Hugging Face hub (owner/name)."""
    hub_private_repo: bool = option(True, needs="push_to_hub")
    """Create the repository of --push_to_hub private; one that exists stays as it is."""
    use_ds_universal_ckpt: bool = option(
        False, refused="is not needed: a checkpoint made here loads on any number of processes; leave it out"
    )
    """DeepSpeed's universal checkpoints. Refused: ours need no conversion."""

    @property
    def checkpoint_folder(self) -> str:
        return self.ckpt_path or checkpoints_in(self.save_path)

    @property
    def own_folders(self) -> dict[str, str]:
        """The folders in which no other run may be at work, by the options that name them."""
        folders = {"save_path": self.save_path}
        if self.load_checkpoint or (self.save_steps > 0 and not self.disable_ds_ckpt):
            folders["ckpt_path"] = self.checkpoint_folder
        return folders

    def settle(self, changes: dict[str, Any]) -> Iterable[str]:
        changes["ckpt_path"] = self.checkpoint_folder
        return ()

    def check(self) -> Iterable[str]:
        if not self.save_path.strip():
            raise UserError("--save_path is empty: give a folder for the run and its model")
        source = self.pretrain if isinstance(self, PretrainOptions) else None
        if source and os.path.realpath(os.path.expanduser(source)) == os.path.realpath(self.save_path):
            raise UserError(f"--save_path {self.save_path} is --pretrain: the model it starts from would be lost")
        if self.save_steps > 0 and self.disable_ds_ckpt and not self.save_hf_ckpt:
            return ["--save_steps saves nothing: --disable_ds_ckpt is on and --save_hf_ckpt is not"]
        if self.save_steps > 0:
            return ()
        return self.idle(("save_hf_ckpt", "disable_ds_ckpt"), "without --save_steps, unless the run is stopped")


class LoggingOptions(Options):
    """Logging and evaluation"""

    logging_steps: int = option(1, at_least=1)
    """Show and send metrics every N optimiser steps (RL: iterations); metrics.jsonl has every one."""
    eval_steps: int = every(-1)
    """Evaluate every N optimiser steps (RL: iterations); -1: after each epoch (RL: at the start and the end)."""
    use_wandb: str | None = secret(None, bare="True")
    """Send metrics to wandb: True (after `wandb login`), online, offline, or an API key."""
    wandb_org: str | None = option(None, needs="use_wandb")
    """wandb entity."""
    wandb_group: str | None = option(None, needs="use_wandb")
    """wandb group."""
    wandb_project: str = option("trimtab", needs="use_wandb")
    """wandb project."""
    wandb_http_proxy: str | None = option(None, needs="use_wandb", addresses=True)
    """Address of an HTTP proxy that wandb's traffic goes through, and nothing else."""
    wandb_run_name: str | None = None
    """Name of the run in wandb and trackio, and of its folder in TensorBoard and VisualDL; unset: the job and the
    time."""
    use_tensorboard: str | None = None
    """Folder for TensorBoard files."""
    use_visualdl: str | None = None
    """Folder for VisualDL files (needs the visualdl package)."""
    use_trackio: str | None = secret(None, bare="True")
    """Send metrics, and in RL answers as traces, to trackio: True (files on this machine), or the address of a trackio
    server."""
    trackio_project: str = option("trimtab", needs="use_trackio")
    """trackio project."""

    def settle(self, changes: dict[str, Any]) -> Iterable[str]:
        if self.wandb_run_name is None and isinstance(self, CallOptions):
            changes["wandb_run_name"] = f"{self.verb}_{time.strftime('%Y%m%dT%H%M%S')}"
        return ()

    def check(self) -> Iterable[str]:
        if self.use_trackio and self.use_trackio != "True" and not self.use_trackio.startswith(("http://", "https://")):
            raise UserError("--use_trackio: give it alone, or the address of a trackio server that begins with http")
        if self.use_wandb or self.use_tensorboard or self.use_visualdl or self.use_trackio:
            return ()
        return self.idle(["wandb_run_name"], "without --use_wandb, --use_tensorboard, --use_visualdl or --use_trackio")


class AnswerOptions(LoggingOptions):
    """Logging and evaluation"""

    report_samples: int = option(0, at_least=0)
    """After the run let the model before and the model after it answer this many prompts, and show them in the
    report."""

    def check(self) -> Iterable[str]:
        if self.report_samples and isinstance(self, LoadOptions) and self.load_in_4bit:
            raise UserError("--report_samples loads the model unquantised: leave it out, or --load_in_4bit")
        return ()


class ProcessOptions(Options):
    """Processes and sharding"""

    nproc: int = of_this_call(1, above=0)
    """Start this many processes on this machine, which work together. (torchrun and deepspeed work too.)"""
    local_rank: int = of_this_call(-1)
    """Set by launchers."""
    hang_timeout: float = of_this_call(1800.0, above=0)
    """Seconds after which one of several processes that gives no sign of life, or whose work does not move, is named
    and ended."""
    zero_stage: int = option(2, choices=range(4))
    """What is split over processes in training: 0 nothing, 1 and 2 optimiser and gradients, 3 weights too."""

    @property
    def processes(self) -> int:
        """How many this command starts, if no launcher has."""
        return self.nproc

    def data_parts(self, processes: int) -> int:
        """How many of so many processes learn from samples of their own."""
        return processes
