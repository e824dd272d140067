"""Model families: names and switches, no maths. ``registry`` lists them."""
