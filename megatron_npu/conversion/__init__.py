"""``megatron-npu convert``: convert checkpoints between Hugging Face and the built-in trainer.

A family (such as a row of ``hf_llama.KINDS``) is a table that maps the tensors of one side to those of the
other, and the keys of ``config.json`` to flags. All other code is shared by families and directions.
"""
