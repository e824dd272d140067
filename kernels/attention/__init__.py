"""The attention op."""
