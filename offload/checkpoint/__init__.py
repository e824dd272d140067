"""Checkpoints read in place: safetensors directories and GGUF files."""
