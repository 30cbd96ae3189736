"""Whether a model can be split as the options say, from its configuration alone: before anything is loaded."""

from typing import Any

from trimtab.config.groups import DropoutOptions, LoraOptions
from trimtab.config.sharding import ShardingOptions
from trimtab.errors import UserError
from trimtab.models.families import check_can_be_cut, keys_used
from trimtab.models.hugging_face import from_pretrained
from trimtab.models.miniature import KEY_VALUE_HEADS

NOT_ADAPTED = ("embed_tokens", "lm_head")
TRAINED = ("--pretrain", "--critic_pretrain")  # others drop nothing


def check_splits(pretrain: str, options: ShardingOptions, flag: str) -> None:
    """A UserError, in one line. `flag`: what the user calls the model."""
    tensor, context = options.ds_tensor_parallel_size, options.ring_attn_size
    if tensor == context == 1:
        return
    from transformers import AutoConfig

    config = from_pretrained(AutoConfig, pretrain, flag=flag)
    if tensor > 1:
        asked = f"--ds_tensor_parallel_size {tensor}"
        check_can_be_cut(config, tensor, f"{asked}: {flag} {pretrain}")
        _check_adapted(options, asked)
    if context > 1:
        _check_stride(config, options, f"{flag} {pretrain}")
    if flag in TRAINED:
        _check_dropout(config, options, f"{flag} {pretrain}")


def _check_adapted(options: ShardingOptions, asked: str) -> None:
    if isinstance(options, LoraOptions) and options.lora_rank > 0:
        for name in NOT_ADAPTED:
            if name in options.target_modules:
                raise UserError(f"{asked}: --target_modules {name}: a layer cut by vocabulary takes no adapter")


def _check_stride(config: Any, options: ShardingOptions, model: str) -> None:
    stride = options.ring_head_stride
    for keys in key_heads(config, options.ds_tensor_parallel_size):
        if keys % stride:
            fits = max(size for size in range(1, stride) if keys % size == 0)
            cut = f" that a process has (--ds_tensor_parallel_size {options.ds_tensor_parallel_size})"
            raise UserError(
                f"--ring_head_stride {stride} does not divide the {keys} heads of keys of {model}"
                f"{cut if options.ds_tensor_parallel_size > 1 else ''}: use {fits}"
            )


def key_heads(config: Any, parts: int) -> set[int]:
    """How many heads of keys the processes have that a model's layers are cut over."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    keys = next((found for name in KEY_VALUE_HEADS if (found := getattr(text, name, None))), heads)
    if keys % parts == 0:
        return {keys // parts}
    return {len(keys_used(heads, keys, parts, part)) for part in range(parts)}


def _check_dropout(config: Any, options: ShardingOptions, model: str) -> None:
    """Jobs without the option keep a model's dropout."""
    chosen = isinstance(options, DropoutOptions)
    if isinstance(options, DropoutOptions) and not options.keep_dropout:
        return
    for name, value in vars(config.get_text_config()).items():
        if "att" in name and "drop" in name and isinstance(value, float) and value > 0:
            told, mend = ("--keep_dropout: ", "leave it out") if chosen else ("", f"set {name} to 0 in its config.json")
            raise UserError(
                f"{told}{model} drops attention weights ({name} {value:g}), which processes that share rows or layers "
                f"cannot draw together; {mend}"
            )
