"""Implement ``megatron-npu convert``, which converts checkpoints from and to the Hugging Face format.

A model family (for example, a row of ``hf_llama.KINDS``) defines how the tensors of one side map to those of
the other side, and how the keys of ``config.json`` map to flags. All other code is shared by the families and
by both directions.
"""
