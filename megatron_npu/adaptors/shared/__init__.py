"""Code shared by the adaptors of several upstreams."""
