"""Implement ``--task pretraining``, which pre-trains a Transformers model on ``.bin/.idx`` data.

The model is a BERT or a causal model.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.data import mmap_datasets
from megatron_npu.finetune.data.word_pieces import WordPieces, word_pieces
from megatron_npu.finetune.model import pretrained
from megatron_npu.finetune.run.flag_parts import PieceFlags
from megatron_npu.finetune.tasks.declaration import Declaration
from megatron_npu.pretrain.data import tokenizers
from megatron_npu.pretrain.data.tokenizers import DatasetTokenizer
from megatron_npu.pretrain.flags.plan_parts import TokenizerFlags

_FLAG = "--pretrained-model-name-or-path"
# names of the hub whose configuration is the default of Transformers' class, so that no file is needed
_KNOWN = {"bert-base-uncased": "bert", "gpt2": "gpt2", "openai-community/gpt2": "gpt2"}
_KNOWN |= {"google-bert/bert-base-uncased": "bert"}
_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_OF_CONFIG = {"num_layers": "num_hidden_layers"}


class PreTraining(Declaration):
    """Task that pre-trains ``BertForPreTraining`` (masked words and next sentence) or an
    ``AutoModelForCausalLM``.

    ``--num-layers``, ``--hidden-size``, ``--num-attention-heads`` and ``--max-position-embeddings`` override
    the configuration of the named model; a model with other sizes starts with new weights.
    """

    name = "pretraining"
    template = "PreTrainer"
    reads = (
        *("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"),
        *("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size"),
        *("data_cache_path", "split", "mask_prob", "short_seq_prob"),
    )

    @classmethod
    def check(cls, args: Namespace) -> None:
        """Reject ``--epochs``, because the number of iterations determines how many samples are used."""
        if args.epochs is not None:
            raise UsageError(
                f"--epochs {args.epochs} cannot be used with --task pretraining, which computes the number "
                "of samples from --train-iters. Pass --train-iters N instead."
            )

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.args = engine.args

    def train_valid_test_datasets_provider(self, train_val_test_num_samples: Any) -> Any:
        """Return masked sentence pairs for BERT, or token windows for a causal model."""
        args = self.args
        self._require_every_token()
        common = {
            "data_prefix": args.data_path,
            "data_impl": args.data_impl,
            "splits_string": args.split,
            "train_valid_test_num_samples": train_val_test_num_samples,
            "seed": args.seed,
            "skip_warmup": not args.mmap_warmup,
        }
        if not self._masked:
            return mmap_datasets.build_causal_datasets_for_huggingface(**common, seq_length=self._length)
        return mmap_datasets.build_train_valid_test_datasets_for_huggingface(
            **common,
            max_seq_length=self._length,
            masked_lm_prob=args.mask_prob,
            short_seq_prob=args.short_seq_prob,
            binary_head=self._next_sentence,
        )

    def _require_every_token(self) -> None:
        """Check that the model has an embedding for every id in the vocabulary that the flags select.

        Raises:
            UsageError: the model has fewer embeddings.
        """
        if self._masked:
            vocabulary: WordPieces | DatasetTokenizer = word_pieces(PieceFlags.of(self.args))
        else:
            vocabulary = DatasetTokenizer(tokenizers.build(TokenizerFlags.of(self.args)))
        known = self._config[0].get_text_config().vocab_size
        if vocabulary.vocab_size > known:
            raise UsageError(
                f"{_FLAG} {self.args.pretrained_model_name_or_path} has embeddings for {known} tokens, but "
                f"the vocabulary has {vocabulary.vocab_size}; every token must have an embedding. Use the "
                "vocabulary that the model was trained with, or another model."
            )

    def model_optimizer_lr_scheduler_provider(self) -> tuple[nn.Module, Any, Any]:
        """Return the model with the weights from its folder if they are compatible, otherwise with new
        weights.
        """
        import transformers

        name, (config, differs) = self.args.pretrained_model_name_or_path, self._config
        auto = getattr(transformers, self._auto)
        if differs or not _has_weights(name):
            self._say(
                f"{name}: using newly initialized weights" + (f" ({', '.join(differs)})" if differs else "")
            )
            return auto.from_config(config, dtype=torch.float32), None, None
        return pretrained.loaded(name, auto, config), None, None

    def run_forward_step(self, data_iterator: Iterator[Any], model: nn.Module) -> Tensor:
        """Return the model's loss, which is the sum of two losses for a model with two heads."""
        return model(**next(data_iterator)).loss

    @functools.cached_property
    def _config(self) -> tuple[Any, list[str]]:
        """Return the model's configuration, and a description of each value that the flags have changed."""
        from transformers import AutoConfig

        args = self.args
        name = args.pretrained_model_name_or_path
        if not Path(name).is_dir() and name in _KNOWN and not pretrained.is_cached(name):
            found = AutoConfig.for_model(_KNOWN[name])
            self._say(
                f"{name} is not available locally: using Transformers' default configuration of "
                f"{_KNOWN[name]}"
            )
        else:
            found = pretrained.config(name)
        differs = []
        for flag in _SIZES:
            asked, field = getattr(args, flag), _OF_CONFIG.get(flag, flag)
            if asked is not None and getattr(found, field, None) != asked:
                differs.append(f"{field} {asked}")
                setattr(found, field, asked)
                if field == "hidden_size" and hasattr(found, "intermediate_size"):
                    found.intermediate_size = 4 * asked
        _require_heads(found)
        return found, differs

    @property
    def _masked(self) -> bool:
        """True if the model sees the whole text and predicts masked words in it."""
        config = self._config[0]
        causal = pretrained.has_head(config, "AutoModelForCausalLM")
        masked = pretrained.has_head(config, "AutoModelForMaskedLM")
        if not (causal or masked) or config.is_encoder_decoder:
            raise UsageError(
                f"--task pretraining does not support {self.args.pretrained_model_name_or_path}, a "
                f"{config.model_type}; it requires BERT or another masked language model, or a causal model "
                "such as GPT-2. Use another model."
            )
        return masked and not getattr(config, "is_decoder", False)

    @property
    def _next_sentence(self) -> bool:
        """True if the model has a next-sentence head."""
        return self._auto == "AutoModelForPreTraining"

    @property
    def _auto(self) -> str:
        if not self._masked:
            return "AutoModelForCausalLM"
        from transformers.models.auto import modeling_auto

        two_heads = modeling_auto.MODEL_FOR_PRETRAINING_MAPPING.get(type(self._config[0]), None)
        return "AutoModelForPreTraining" if _takes_pairs(two_heads) else "AutoModelForMaskedLM"

    @property
    def _length(self) -> int:
        config, args = self._config[0], self.args
        most = getattr(config, "max_position_embeddings", None)
        if args.seq_length and most and args.seq_length > most:
            raise UsageError(
                f"--seq-length must be at most {most}, the number of positions of "
                f"{args.pretrained_model_name_or_path}, but got {args.seq_length}. Use fewer tokens, or a "
                "larger --max-position-embeddings."
            )
        return args.seq_length or most or 512

    def _say(self, line: str) -> None:
        if self.args.rank == 0:
            print(f"megatron_npu: {_FLAG} {line}", flush=True)


def _takes_pairs(model: Any) -> bool:
    import inspect

    return model is not None and "next_sentence_label" in inspect.signature(model.forward).parameters


def _has_weights(name: str) -> bool:
    if not Path(name).is_dir():
        return pretrained.is_cached(name, "model.safetensors") or name not in _KNOWN
    return any(Path(name).glob("*.safetensors*"))


def _require_heads(config: Any) -> None:
    heads, size = config.num_attention_heads, config.hidden_size
    if size % heads:
        raise UsageError(
            f"--hidden-size must be a multiple of --num-attention-heads {heads}, but got {size}. Change one "
            "of the two."
        )
