"""Simulated Ascend NPUs: the real torch_npu wheel on a CANN whose device memory is host memory."""
