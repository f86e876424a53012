"""JSON from outside: what is refused, and in what words."""

import pytest

from gspo_jax.system import jsons

REFUSED = {
  b"": "it is not JSON",
  b'{"a": 1': "it is not JSON",
  b"\0" * 9: "it is not JSON",
  b'{\n"a": 1': "it is not JSON: .*: line 2 column 7$",
  b'"\xff"': "it is not UTF-8",
  b"[" * 10**5 + b"]" * 10**5: "it is nested too deeply",
  b'{"a":' * 10**5 + b"1" + b"}" * 10**5: "it is nested too deeply",
  b"[" * 201 + b"]" * 201: "it is nested too deeply",
  b'[{"a": 1, "b": 2, "b": 3}]': "it has the key 'b' twice",
  b"9" * 5000: "Exceeds the limit",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:9])
def test_what_is_no_json_is_a_value_error(text, tmp_path):
  with pytest.raises(ValueError, match=REFUSED[text]):
    jsons.parse(text)
  path = tmp_path / "a.json"
  path.write_bytes(text)
  with pytest.raises(ValueError, match=f"^{path}: {REFUSED[text]}"):
    jsons.read_object(path)


def test_many_objects_side_by_side_are_not_deep():
  assert len(jsons.parse("[" + "[{}]," * 1000 + "[]]")) == 1001
  assert jsons.parse("[" * 200 + "]" * 200)


def test_many_keys_are_looked_at_once():
  keys = ", ".join(f'"{i}": 0' for i in range(100_000))
  with pytest.raises(ValueError, match="it has the key '99999' twice"):
    jsons.parse(f'{{{keys}, "99999": 1}}')  # an hour, if each were compared with all before it


def test_an_object_is_asked_for(tmp_path):
  assert jsons.parse(b'\xef\xbb\xbf{"a": [1]}') == {"a": [1]}
  with pytest.raises(ValueError, match=r"it is not a JSON object, but \[1\]"):
    jsons.parse_object("[1]")
  with pytest.raises(ValueError, match=f"^{tmp_path} cannot be read: Is a directory"):
    jsons.read_object(tmp_path)
