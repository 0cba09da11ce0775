"""One forward, sharded: a model's own code sees global tensors; underneath, each rank computes with its shard."""
