"""The experts op."""
