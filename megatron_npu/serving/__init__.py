"""``megatron-npu serve``: text of a trained model over HTTP, as OpenAI's completions, and a page."""
