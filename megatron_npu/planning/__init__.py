"""``megatron-npu plan``: run the ranks of a job one by one on this machine, counting only device memory."""
