"""The inside of a sandbox. Standard library only: it is loaded without the package above it."""
