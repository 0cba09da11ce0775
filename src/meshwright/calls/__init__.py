"""A module's calls: followed while it is recorded, and run in part by stages and branches."""
