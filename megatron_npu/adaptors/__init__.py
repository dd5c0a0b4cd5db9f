"""What connects a Megatron's symbols to operations: a folder for each upstream, and what they share."""
