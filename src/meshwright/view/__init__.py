"""Global view, local work: a model's own forward sees whole tensors; underneath, each rank works on its slice."""
