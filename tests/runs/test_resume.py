"""Configurations of docs/objectives.md whose own tests kill no run: each goes on exactly."""

import pytest
from support.command_line import SMALL, killed_and_whole

CONFIGS = "tiny_ppo tiny_rft tiny_agents tiny_segments tiny_segments:steps tiny_segments:long"


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS.split())
def test_a_run_that_was_killed_ends_as_if_it_had_not_been(name, tmp_path):
  which, _, variant = name.partition(":")
  config = f"configs/{which}.py" + (f":{variant}" if variant else "")
  killed_and_whole(tmp_path, [*SMALL, "rl.iterations=6"], config=config)
