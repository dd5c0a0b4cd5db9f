"""Read untrusted files without executing code from them."""
