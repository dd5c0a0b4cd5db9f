"""``megatron-npu plan``: a job's ranks run here one by one, on memory that is only counted."""
