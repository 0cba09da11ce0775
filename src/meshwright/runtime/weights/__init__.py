"""Parameters at rest: their shards, FSDP2, recomputing, what no row used, norms, whole values."""
