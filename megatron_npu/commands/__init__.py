"""Define the table of ``megatron-npu`` commands, and the commands without a package of their own."""
