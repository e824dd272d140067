"""Ways to bring bytes from the disk into memory."""
