"""The rows of a batch: how they are divided over ranks and microbatches, and how their losses are weighted."""
