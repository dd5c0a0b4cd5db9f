"""The tokenizers that the driver builds."""

from __future__ import annotations

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.data.tokenizers import NullTokenizer


def test_null_tokenizer():
    tokenizer = NullTokenizer(10)
    assert (tokenizer.vocab_size, tokenizer.eod) == (11, 10)
    assert tokenizer.decode(tokenizer.encode("3 10 0")) == "3 10 0"
    with pytest.raises(UsageError, match="numbers from 0 to 10"):
        tokenizer.encode("3 11")
    other = NullTokenizer(10, end=3)
    assert (other.vocab_size, other.eod, other.encode("10")) == (11, 3, [10])
