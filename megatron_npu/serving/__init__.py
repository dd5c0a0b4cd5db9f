"""``megatron-npu serve``: serve a trained model over HTTP with OpenAI's completions API and a web page."""
