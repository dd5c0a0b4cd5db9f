"""``megatron-npu COMMAND``: the table of commands, and the commands that have no package of their own."""
