"""``megatron-npu convert``: convert checkpoints between Hugging Face and the built-in trainer.

A family (a row of ``hf_llama.KINDS``, say) is a table: which tensors of one side make which of the other, and
which keys of ``config.json`` mean which flags. Everything else is written once and used in both directions.
"""
