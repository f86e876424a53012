"""What a model wrote, where people read it."""

import pytest

from gspo_jax.cli import flags
from gspo_jax.system.text import visible


def test_only_what_would_not_be_seen_is_changed():
  plain = "a\tb\n é 数 \u200d 😀 \\x1b"
  assert visible(plain) == plain
  unseen = [*range(9), *range(11, 32), *range(127, 160), 0x61C, 0x200E, 0x200F]
  unseen += [*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xD800, 0xDFFF]
  for code in unseen:
    text = visible(f"a{chr(code)}b")
    assert text.isascii() and text.isprintable() and text[0] + text[-1] == "ab", hex(code)


def test_what_a_model_wrote_does_not_reach_the_terminal_as_a_command(capsys):
  with pytest.raises(SystemExit):
    flags.refuse(ValueError("no verdict on any of 8 (8 times: crash: KeyError: '\x1b]0;x\x07')"))
  stderr = capsys.readouterr().err
  assert r"'\x1b]0;x\x07'" in stderr and stderr.rstrip("\n").isprintable()


def test_an_error_on_one_of_several_hosts_ends_its_process_at_once(monkeypatch):
  """A normal exit waits for hosts that wait for this one, and then has another code."""
  monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
  codes = []
  monkeypatch.setattr("os._exit", codes.append)
  with pytest.raises(SystemExit):
    flags.refuse(ValueError("a bad file"))
  assert codes == [2]
