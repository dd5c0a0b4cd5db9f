"""What the adaptors of several Megatrons have in common."""
