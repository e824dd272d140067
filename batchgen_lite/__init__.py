"""Batch inference for language models larger than the machine's memory."""

__version__ = "0.1.0"
