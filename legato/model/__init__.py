"""GLM-5.2 as it is: shapes, weights by name, and the forward pass written with `legato.ops`."""
