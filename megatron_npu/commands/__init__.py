"""``megatron-npu COMMAND``: the table of commands, and commands without a package of their own."""
