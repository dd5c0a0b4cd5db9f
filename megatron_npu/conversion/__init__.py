"""``megatron-npu convert``: convert checkpoints between Hugging Face and the built-in trainer.

A family (such as a row of ``hf_llama.KINDS``) is a table: which tensors of one side correspond to which of
the other, and which keys of ``config.json`` correspond to which flags. All other code is shared by families
and directions.
"""
