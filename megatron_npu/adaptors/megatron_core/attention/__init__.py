"""Patch the attention of megatron-core: masks, context parallelism, and the choice of our operation.

``core_attention`` patches ``transformer.dot_product_attention``: ``layer_options`` contains what is decided
when a layer is built, ``call`` describes one forward call, and ``attention_mask`` and ``context_parallel``
interpret it. ``softmax`` patches ``fusions.fused_softmax``, for attention that does not use the fused path;
``backends`` patches the switches that select an attention implementation.
"""
