"""The norm op."""
