"""Extracts, parses and compares mathematical answers.

`extract`, `spelling`, `units` and `quantity` run in the trainer, in time linear in the text.
`tokens`, `expression`, `structure`, `equal` and their other imports need SymPy, and run in the
verifier's processes.
"""
