"""The dequant op."""
