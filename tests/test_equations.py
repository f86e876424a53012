"""Equations of docstrings are typeset as they are meant (docs/extensions/equations.py)."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "docs/extensions/equations.py"
spec = importlib.util.spec_from_file_location("equations", PATH)
equations = importlib.util.module_from_spec(spec)
spec.loader.exec_module(equations)

TYPESET = {
  "s_i = exp( 1/|y_i| Σ_t log π_θ(y_it)/π_old(y_it) )": (
    r"s_{i} = \exp \left(\frac{1}{\left|y_{i}\right|} \sum_{t} \log "
    r"\frac{π_{θ}\left(y_{it}\right)}{π_{\mathrm{old}}\left(y_{it}\right)}\right)"
  ),
  "J = 1/G Σ_i min( s_i Â_i, clip(s_i, 1 − clip_low) Â_i )": (
    r"J = \frac{1}{G} \sum_{i} \min \left(s_{i} \hat{A}_{i}, \operatorname{clip}"
    r"\left(s_{i}, 1 - \mathtt{clip\_low}\right) \hat{A}_{i}\right)"
  ),
  "v_l = 1 − 1/(T·k) Σ_t |A_lt ∩ B_lt|": (
    r"v_{l} = 1 - \frac{1}{T\cdot k} \sum_{t} \left|A_{lt} \cap B_{lt}\right|"
  ),
  "L = −(Σ_i w_i x_i)/(Σ_i w_i |y_i|)": (
    r"L = \frac{-\left(\sum_{i} w_{i} x_{i}\right)}{\sum_{i} w_{i} \left|y_{i}\right|}"
  ),
  "c = β² e^{−x}": r"c = β^2 e^{-x}",
}


@pytest.mark.parametrize("text", TYPESET)
def test_an_equation_is_typeset_as_it_is_meant(text):
  assert "".join(equations.tex(text).split()) == "".join(TYPESET[text].split())


def test_a_paragraph_is_split_where_the_next_symbol_begins():
  text = "J = Σ_i f(a, b),  s_i = exp(x), and"
  assert equations.split(text) == ["J = Σ_i f(a, b)", "s_i = exp(x), and"]
  assert equations.EQUATION.match("s_i = 1") and not equations.EQUATION.match("The mean = 1")
