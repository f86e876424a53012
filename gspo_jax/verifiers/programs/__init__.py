"""Verifies programs by running them on tests, in sandboxes."""

# Values of reward.isolation. "auto" means "namespaces", or an error if they are not available.
ISOLATIONS = ("auto", "namespaces", "none")
