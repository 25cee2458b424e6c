"""The engine: one loop that lets plans, flights and outcomes go round."""
