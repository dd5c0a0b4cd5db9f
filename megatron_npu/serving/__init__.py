"""Serve a trained model over HTTP with OpenAI's completions API and a web page: ``megatron-npu serve``."""
