"""Module calls: traced while a forward is recorded, and run in part by stages and branches."""
