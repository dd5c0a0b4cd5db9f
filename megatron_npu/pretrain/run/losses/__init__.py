"""The losses of a run: of its tokens, of prediction layers, of balanced experts."""
