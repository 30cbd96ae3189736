"""Whether a model can be split as the options say, from its configuration alone: before anything is loaded."""

from trimtab.config.groups import LoraOptions
from trimtab.config.sharding import ShardingOptions
from trimtab.errors import UserError
from trimtab.models.families import check_can_be_cut
from trimtab.models.hugging_face import from_pretrained

NOT_ADAPTED = ("embed_tokens", "lm_head")


def check_splits(pretrain: str, options: ShardingOptions, flag: str) -> None:
    """A UserError, in one line. `flag`: what the user calls the model."""
    if options.ds_tensor_parallel_size == 1:
        return
    from transformers import AutoConfig

    asked = f"--ds_tensor_parallel_size {options.ds_tensor_parallel_size}"
    config = from_pretrained(AutoConfig, pretrain, flag=flag)
    check_can_be_cut(config, options.ds_tensor_parallel_size, f"{asked}: {flag} {pretrain}")
    if isinstance(options, LoraOptions) and options.lora_rank > 0:
        for name in NOT_ADAPTED:
            if name in options.target_modules:
                raise UserError(f"{asked}: --target_modules {name}: a layer cut by vocabulary takes no adapter")
