"""Attention of megatron-core: masks, context parallelism and the choice of the operation.

``core_attention`` connects ``transformer.dot_product_attention``: ``layer_options`` holds what is decided
when a layer is built, ``call`` describes one forward call, and ``attention_mask`` and ``context_parallel``
interpret it. ``softmax`` connects ``fusions.fused_softmax``, for attention that does not take the fused path;
``backends`` connects the switches that select an attention implementation.
"""
