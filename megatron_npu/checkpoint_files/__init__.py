"""What is beside the tensors of a checkpoint: checksums, the lock of its folder, equal replicas."""
