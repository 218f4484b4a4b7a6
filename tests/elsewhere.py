"""Tiny models as they come from elsewhere: a reward model and classifiers with random weights and tokenizers of their
own, which differ from those of the tests' policies."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from tests.architectures.kinds import KINDS, texts

CONTEXT = 512
SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def save_reward_model(folder: Path, kind: str = "qwen2", seed: int = 0, context: int = CONTEXT) -> Path:
    """A Llama with one output and one of the tokenizers of `KINDS`."""
    tokenizer = KINDS[kind]()
    torch.manual_seed(seed)
    config = LlamaConfig(
        **SIZE, vocab_size=len(tokenizer), max_position_embeddings=context, num_labels=1, initializer_range=0.3,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_language_model(folder: Path, kind: str = "qwen2", seed: int = 0, context: int = CONTEXT) -> Path:
    """The same without a head for scores."""
    tokenizer = KINDS[kind]()
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZE, vocab_size=len(tokenizer), max_position_embeddings=context, initializer_range=0.3)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def words() -> PreTrainedTokenizerBase:
    """Whole words between [CLS] and [SEP], pairs with types of tokens; no chat template."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    known = sorted({word for text in texts() for word in text.replace(".", " . ").split()} | set("[]ABCDEFGHIJLOPSU"))
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*special, *known])}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(special)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=inputs, **names)


def save_classifier(folder: Path, labels: tuple[str, ...] = ("NEGATIVE", "POSITIVE"), seed: int = 0) -> Path:
    """A BERT with an output for each label, and the tokenizer `words`."""
    tokenizer = words()
    torch.manual_seed(seed)
    named = dict(enumerate(labels))
    config = BertConfig(
        **SIZE, vocab_size=len(tokenizer), max_position_embeddings=CONTEXT, initializer_range=0.3, id2label=named,
        label2id={label: i for i, label in named.items()}, pad_token_id=0,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_roberta(folder: Path, positions: int) -> Path:
    """A RoBERTa with one output, whose first positions are those of padding."""
    tokenizer = words()
    config = RobertaConfig(
        **SIZE, vocab_size=len(tokenizer), max_position_embeddings=positions, num_labels=1, pad_token_id=1,
        type_vocab_size=1,
    )  # fmt: skip
    torch.manual_seed(0)
    RobertaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(folder)
    return folder
