"""Batch inference for language models larger than the machine's memory."""
