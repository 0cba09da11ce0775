"""Ranks that stop answering: heartbeats, where each is, one report, and an end that a launcher restarts on."""
