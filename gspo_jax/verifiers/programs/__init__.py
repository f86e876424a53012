"""Programs, verified by their tests in sandboxes."""

ISOLATIONS = ("auto", "namespaces", "none")  # "auto" never takes "none".
