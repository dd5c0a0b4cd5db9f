"""``megatron-npu COMMAND``: the table of commands, and those that have no room of their own."""
