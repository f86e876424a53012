"""Mathematical answers: found in a text, read, compared.

`extract`, `spelling`, `units` and `quantity` run in the trainer and cost time linear in the text.
`tokens`, `expression`, `structure`, `equal` and what these import need SymPy, and run in the
verifier's processes.
"""
