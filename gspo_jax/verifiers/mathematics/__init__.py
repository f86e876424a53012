"""Extracts, parses and compares mathematical answers.

`extract` finds the answer in a response, and `quantity` compares plain numbers. These two modules
and their imports run in the trainer's process, in time linear in the text.

Other answers are split into `tokens`, parsed by `structure` (whole answers) and `expression`
(single values), and compared by `equal`. `structure`, `expression` and `equal` import SymPy, and
run in the verifier's worker processes.
"""
