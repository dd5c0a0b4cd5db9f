"""Folders of models with random weights, as ``save_pretrained`` writes them: 32 wide, no dropout.

Their tokenizers are made on the spot: whole words of ``WORDS``, what BERT, GPT-2 and T5 put around a text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = tuple(
    "the a cat dog king queen sun moon saw loved fled told red old wise dark river house Paris Rome Anna "
    "Karl who where what is was in of to and very great small runs sleeps sings . , ?".split()
)
_SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_T5 = ("<pad>", "</s>", "<unk>")
_GPT = ("<|endoftext|>", "<unk>")


def bert(folder: Path, head: str = "ForMaskedLM", **changes: Any) -> Path:
    """Write a BERT with a head, such as ``ForSequenceClassification``, or none; return its folder."""
    tokenizer = _tokenizer(
        _BERT, "[UNK]", "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ("[CLS]", "[SEP]")
    )
    words = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    own = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 64}
    config = transformers.BertConfig(**(_SIZE | _NO_DROPOUT | own | changes))
    return _write(folder, f"BertModel{head}".replace("ModelFor", "For"), config, tokenizer, words)


def gpt2(folder: Path, head: str = "LMHeadModel", **changes: Any) -> Path:
    """Write a GPT-2; return its folder."""
    tokenizer = _tokenizer(_GPT, "<unk>")
    config = transformers.GPT2Config(
        **(
            {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
            | {"vocab_size": tokenizer.get_vocab_size(), "bos_token_id": 0, "eos_token_id": 0}
            | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            | changes
        )
    )
    return _write(folder, f"GPT2{head}", config, tokenizer, {"eos_token": "<|endoftext|>"})


def t5(folder: Path, **changes: Any) -> Path:
    """Write a T5; return its folder."""
    tokenizer = _tokenizer(_T5, "<unk>", "$A </s>", "$A </s> $B </s>", ("</s>",))
    config = transformers.T5Config(
        **(
            {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
            | {"vocab_size": tokenizer.get_vocab_size(), "decoder_start_token_id": 0}
            | changes
        )
    )
    words = {"pad_token": "<pad>", "eos_token": "</s>"}
    return _write(folder, "T5ForConditionalGeneration", config, tokenizer, words)


def mixtral(folder: Path, **changes: Any) -> Path:
    """Write a Mixtral of four experts, two of them for each token; return its folder."""
    tokenizer = _tokenizer(_GPT, "<unk>")
    config = transformers.MixtralConfig(
        **(
            _SIZE
            | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
            | {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 64}
            | {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
            | changes
        )
    )
    return _write(folder, "MixtralForCausalLM", config, tokenizer, {"eos_token": "<|endoftext|>"})


def _tokenizer(
    special: tuple[str, ...], unknown: str, single: str = "", pair: str = "", around: tuple[str, ...] = ()
) -> Tokenizer:
    vocabulary = {word: number for number, word in enumerate((*special, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse() if not single else decoders.WordPiece()
    tokenizer.add_special_tokens(list(special))
    if single:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[(token, vocabulary[token]) for token in around]
        )
    return tokenizer


def _write(folder: Path, name: str, config: Any, tokenizer: Tokenizer, words: dict[str, str]) -> Path:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=tokenizer.model.unk_token, model_max_length=64, **words
    )
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        getattr(transformers, name)(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder
