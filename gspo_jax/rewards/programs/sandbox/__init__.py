"""What runs inside a sandbox. Standard library only: it is loaded without the package above it."""
