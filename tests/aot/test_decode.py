"""What the compiler makes of decoding with a cache in pages; needs libtpu."""

import re

import pytest
from support.aot import SMALL, needs_libtpu, run

pytestmark = needs_libtpu


@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
@pytest.mark.long
def test_the_cache_is_read_where_it_lies_and_never_copied(topology, tmp_path):
  shape = dict(head_dim=128, num_heads=4, num_kv_heads=2, num_layers=2)
  model = [f"--config.model.{key}={value}" for key, value in shape.items()]
  sampler = ("--slots=32", "--config.engine.cache_tokens=65536", "--config.engine.page_tokens=128")
  out = (f"--topology={topology}", "--programs=decode", f"--text={tmp_path}")
  done = run(*out, *SMALL, *model, *sampler, "--config.sampling.max_new_tokens=2000")
  assert done.returncode == 0, done.stdout + done.stderr
  text = (tmp_path / "decode.txt").read_text()
  found = re.findall(r"= .*bf16\[(?:2,\d+|\d+),2,2,128,128\]\S* ([a-z][\w-]*)\(", text)
  pool = re.search(r"bf16\[2,(\d+),2,2,128,128\]", text)[1]
  assert int(pool) * 128 * 4 <= 65536 < (int(pool) + 8) * 128 * 4
  assert "custom-call" in found  # the kernel, which writes in place
  assert {"copy", "copy-start", "transpose", "convert", "gather", "scatter"}.isdisjoint(found)
