"""The inside of a sandbox, loaded without its parent package. Imports the standard library only."""
