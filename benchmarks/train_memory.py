"""Peak memory of a rank under each switch of `megatron-npu train`, counted on simulated NPUs, beside arithmetic.

    megatron-npu sim --devices 4 -- python benchmarks/train_memory.py [--ranks 2 4]

A GPT-2 of Transformers in fp32 with AdamW. Of N weights, R of them outside the blocks and B in each of L blocks, over
W ranks, fp32 takes 4 bytes for a weight, 4 for its gradient and 8 for AdamW's two moments. Peaks are of whole steps
(forward, backward, clipping, optimizer) after the first two; torch_npu's allocator counts them to the byte.

    none           16 N + A            weights, gradients (DDP's buckets stay), moments; A: activations, see below
    zero-1         8 N + 8 N/W + A     moments of a rank's rows
    zero-2         4 N + 12 N/W + A    at the end of the forward pass: weights whole, shards, moments of shards
    zero-3, fsdp   12 N/W + 4 R + 8 B + A or 16 N/W + 4 R + 16 B + a: see `fully`
    cpu offload    8 N + A             moments and main weights on the host
    fsdp offload   the same as fsdp without what is at rest: its shards
    checkpointing  L inputs of blocks and the activations of one block in place of those of L blocks

A and a (of one block) are measured: A in the run without any switch, a as the difference of a block more. Results go to
benchmarks/results/train-memory.json.
"""
