"""The engine whose samplers are servers of others, and what it is made of."""
