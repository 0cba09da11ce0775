"""Parameters between steps and their gradients: shards, FSDP2, recomputation, unused parameters, norms, full tensors."""
