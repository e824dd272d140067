"""Devices: where a sweep computes, and how weights and KV pages get there from the host's memory."""
