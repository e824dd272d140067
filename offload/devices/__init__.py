"""Where arithmetic runs: cpu, cuda, and sim for tests."""
