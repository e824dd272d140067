"""What a model is: spec from its config, weights by role, decoder maths."""
