"""Mathematical answers: found in a text, read, compared.

`extract` and `quantity` run in the trainer and cost time linear in the text. `tokens`,
`expression`, `structure` and `equal` need SymPy and run in the verifier's processes.
"""
