"""What adapters begin with, for a model whose parts are filled in one by one.

PEFT draws the whole of every adapter from the global random stream as it puts it in. The same is drawn here again,
layer by layer and from the same place of the stream, and each process keeps its part: so adapters begin alike in any
number of processes, and no process holds more than one layer's.
"""

import copy

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from trimtab.distributed.sharding import keep_part

LAYER = "layer"


def fill_adapters(model: nn.Module, random_state: Tensor) -> Tensor:
    """`random_state`: of the CPU, before the adapters were put into the model. Gives the one behind what was drawn."""
    config = copy.copy(model.peft_config["default"])
    config.target_modules, config.modules_to_save = [LAYER], None
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.set_rng_state(random_state)
        for layer in model.modules():
            if isinstance(layer, BaseTunerLayer):
                drawn = dict(_fresh(layer.get_base_layer(), config).named_parameters())
                for name, parameter in layer.named_parameters():
                    if parameter.requires_grad:
                        keep_part(drawn[name], parameter)
        return torch.get_rng_state()


def _fresh(base: nn.Module, config: LoraConfig) -> nn.Module:
    """The adapted layer that PEFT makes of one like `base`, whose own weights take no memory."""
    hollow = copy.copy(base)
    hollow._parameters = {
        name: parameter if parameter is None else nn.Parameter(torch.zeros(()).expand(parameter.shape), False)
        for name, parameter in base._parameters.items()
    }
    return inject_adapter_in_model(config, nn.ModuleDict({LAYER: hollow}))[LAYER]
