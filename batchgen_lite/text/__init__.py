"""Text to tokens and back: tokenizers, chat templates, detokenisation, stop strings."""
