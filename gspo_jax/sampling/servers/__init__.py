"""What `sampling/server.py`, the engine whose samplers are servers of others, is made of."""
