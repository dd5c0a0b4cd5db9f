"""Attention of megatron-core: masks, context parallelism and the choice of the operation.

``core_attention`` connects ``transformer.dot_product_attention``: ``layer_options`` has what a layer decides
when it is built, ``call`` one forward call, ``attention_mask`` and ``context_parallel`` what it means.
``softmax`` connects ``fusions.fused_softmax``, for attention that does not take the fused path; ``backends``
the switches that choose an attention.
"""
