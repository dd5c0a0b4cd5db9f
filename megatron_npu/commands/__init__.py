"""``megatron-npu COMMAND``: the table of commands, and the commands without their own package."""
