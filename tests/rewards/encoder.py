"""An encoder that scores texts: a classifier that is no decoder."""

from pathlib import Path

import torch
from tokenizers import processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from trimtab.embedded.sort_task import make_tokenizer


def write_encoder(folder: Path) -> None:
    """With marks around its inputs and token types that matter."""
    core = make_tokenizer().backend_tokenizer
    marks = [("<user>", 3), ("<unk>", 2)]
    core.post_processor = processors.TemplateProcessing(
        single="<user>:0 $A:0 <unk>:0", pair="<user>:0 $A:0 <unk>:0 $B:1 <unk>:1", special_tokens=marks
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=len(tokenizer), num_labels=1, max_position_embeddings=80, **size)
    )
    for weight in (model.classifier.weight, model.bert.embeddings.token_type_embeddings.weight):
        torch.nn.init.normal_(weight, std=1.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
