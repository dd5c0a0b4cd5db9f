"""Define the table of ``megatron-npu`` commands, and those commands that have no package of their own."""
