"""Files beside a checkpoint's tensors: checksums, the folder's lock, comparison of replicas."""
