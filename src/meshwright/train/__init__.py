"""Training: the loop, what it tells, what ranks agree on after each step, and how it stops."""
