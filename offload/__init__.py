"""Memory tiers: checkpoints, readers, ring, KV pages, devices, budgets."""
