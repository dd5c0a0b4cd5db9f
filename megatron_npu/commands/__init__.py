"""The table of ``megatron-npu`` commands, and the commands that have no package of their own."""
