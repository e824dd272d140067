"""A batch job: input lines in, durable records out, resume."""
