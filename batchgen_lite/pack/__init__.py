"""``batchgen-lite pack``: experts quantised group by group into aligned blobs. The format: docs/pack-format.md."""
