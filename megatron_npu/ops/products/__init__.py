"""Products of linear layers and of their gradients."""
