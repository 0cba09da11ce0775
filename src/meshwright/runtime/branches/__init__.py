"""Running branches: forks and joins between ranks, and streams on one rank."""
