"""What the document leaves to the user: a GPT on megatron-core's layers, and data of one's own."""

from __future__ import annotations

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel as CoreGPT
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from rapidformer import get_args, get_tokenizer


class GPTModel(CoreGPT):
    """This stage of a GPT of the sizes that the flags say."""

    def __init__(self):
        args = get_args()
        # padded, so that tensor-parallel ranks have equal parts; the same for each number of them
        rows = -(-get_tokenizer().vocab_size // 128) * 128
        config = TransformerConfig(
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            num_attention_heads=args.num_attention_heads,
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
        )
        super().__init__(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=rows,
            max_sequence_length=args.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=True,
        )


class Counting(torch.utils.data.Dataset):
    """Texts that count up in steps, of one token more than a model sees."""

    def __init__(self, size, length, seed):
        self.size, self.length, self.seed = size, length, seed

    def __len__(self):
        return self.size

    def __getitem__(self, number):
        generator = np.random.default_rng([self.seed, number])
        first, step = generator.integers(1, 60, 2)
        return {"text": (first + step % 3 * np.arange(self.length + 1)) % 61}


def build_train_valid_test_datasets(
    data_prefix,
    data_impl,
    splits_string,
    train_valid_test_num_samples,
    seq_length,
    seed,
    skip_warmup,
):
    """Return three data sets that need no file."""
    return [Counting(size, seq_length, seed + part) for part, size in enumerate(train_valid_test_num_samples)]
