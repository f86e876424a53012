"""What makes a run another one, and what it began with."""

import pytest

from gspo_jax.runs import provenance

CONFIG = dict(resume="auto", seed=0, weights="DIR", distillation=dict(teacher="TEACHER"))
START, TEACHER = dict(checkpoint="DIR/checkpoints/rl/2"), dict(checkpoint="TEACHER/checkpoints/1")


def test_a_run_that_was_forced_once_goes_on_without(tmp_path):
  provenance.record(tmp_path, CONFIG | dict(resume="force"))
  provenance.check(tmp_path, CONFIG)
  with pytest.raises(ValueError, match=r"another configuration \(seed: 0 -> 1\): use another"):
    provenance.check(tmp_path, CONFIG | dict(seed=1))
  provenance.check(tmp_path, CONFIG | dict(seed=1, resume="force"))


def test_a_run_that_goes_on_says_which_keys_are_others(tmp_path, capsys):
  provenance.record(tmp_path, CONFIG)
  provenance.record(tmp_path, CONFIG)
  assert "another" not in capsys.readouterr().err
  longer = CONFIG | dict(resume="force", seed=1, distillation=dict(teacher=""))
  for run, times in ((longer, 1), (longer, 0), (CONFIG, 1)):
    provenance.record(tmp_path, run)
    said = capsys.readouterr().err
    assert said.count("this run goes on with another seed: ") == times
    assert said.count("another distillation.teacher: ") == times and "resume" not in said
  assert "another seed: 1 -> 0\n" in said


def test_a_run_that_goes_on_is_told_what_it_began_with(tmp_path):
  assert provenance.recorded_origins(None, CONFIG)["start"] == {}
  assert provenance.recorded_origins(tmp_path, CONFIG)["start"] == {}
  provenance.record(tmp_path, CONFIG, START, TEACHER)
  assert provenance.recorded_origins(tmp_path, CONFIG)["start"] == START
  assert provenance.recorded_origins(tmp_path, CONFIG)["teacher"] == TEACHER
  assert provenance.recorded_origins(tmp_path, CONFIG | dict(weights="OTHER"))["start"] == {}
