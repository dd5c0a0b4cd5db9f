"""Provide stubs for the compiled dataset helpers of the supported Megatron versions."""
