"""The router op."""
