"""What may be given, for type checkers and editors."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

Place: TypeAlias = str | os.PathLike[str]
Model: TypeAlias = Place | PreTrainedModel
Tokenizer: TypeAlias = PreTrainedTokenizerBase
Message: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = Place | Dataset | Iterable[str | list[Message] | Mapping[str, Any]]
Reward: TypeAlias = Callable[..., Any] | Place | PreTrainedModel
Listener: TypeAlias = Callable[[dict[str, Any]], object]
