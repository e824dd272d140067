"""A batch job: input lines in, durable records out, resume. Torch-free; the engine is given from outside."""
