"""Identity of a run, and its origins."""

import pytest

from gspo_jax.runs import provenance

CONFIG = dict(resume="auto", seed=0, weights="DIR", distillation=dict(teacher="TEACHER"))
START, TEACHER = dict(checkpoint="DIR/checkpoints/rl/2"), dict(checkpoint="TEACHER/checkpoints/1")


def test_a_forced_run_continues_without_force(tmp_path):
  provenance.record(tmp_path, CONFIG | dict(resume="force"))
  provenance.check(tmp_path, CONFIG)
  with pytest.raises(ValueError, match=r"another configuration \(seed: 0 -> 1\): use another"):
    provenance.check(tmp_path, CONFIG | dict(seed=1))
  provenance.check(tmp_path, CONFIG | dict(seed=1, resume="force"))


def test_a_continued_run_prints_changed_keys(tmp_path, capsys):
  provenance.record(tmp_path, CONFIG)
  provenance.record(tmp_path, CONFIG)
  assert "another" not in capsys.readouterr().err
  longer = CONFIG | dict(resume="force", seed=1, distillation=dict(teacher=""))
  for run, times in ((longer, 1), (longer, 0), (CONFIG, 1)):
    provenance.record(tmp_path, run)
    stderr = capsys.readouterr().err
    assert stderr.count("this run goes on with another seed: ") == times
    assert stderr.count("another distillation.teacher: ") == times and "resume" not in stderr
  assert "another seed: 1 -> 0\n" in stderr


def test_the_origins_of_a_run_are_recorded(tmp_path):
  assert provenance.recorded_origins(None, CONFIG)["start"] == {}
  assert provenance.recorded_origins(tmp_path, CONFIG)["start"] == {}
  provenance.record(tmp_path, CONFIG, START, TEACHER)
  assert provenance.recorded_origins(tmp_path, CONFIG)["start"] == START
  assert provenance.recorded_origins(tmp_path, CONFIG)["teacher"] == TEACHER
  assert provenance.recorded_origins(tmp_path, CONFIG | dict(weights="OTHER"))["start"] == {}
