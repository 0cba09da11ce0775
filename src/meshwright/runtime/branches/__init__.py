"""Branches at work: forks and joins between ranks, and streams of one rank."""
