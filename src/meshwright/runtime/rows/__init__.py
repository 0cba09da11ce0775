"""The rows of a batch: divided over ranks and microbatches, and what their losses weigh."""
