"""Searches for the setup with the highest throughput within a latency budget on a CPU."""
