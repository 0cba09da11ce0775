"""What things cost, before they run."""
