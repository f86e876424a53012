"""Programs, verified by their tests in sandboxes."""

ISOLATIONS = ("auto", "namespaces", "none")  # of programs; "auto" never takes "none"
