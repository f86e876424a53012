"""Identity of a run, and its origins."""

import datetime

import pytest

from gspo_jax.runs import provenance

CONFIG = dict(resume="auto", seed=0, weights="DIR", distillation=dict(teacher="TEACHER"))
START, TEACHER = dict(checkpoint="DIR/checkpoints/rl/2"), dict(checkpoint="TEACHER/checkpoints/1")


def test_a_forced_run_continues_without_force(tmp_path):
  provenance.record(tmp_path, CONFIG | dict(resume="force"))
  provenance.check_configuration(tmp_path, CONFIG)
  with pytest.raises(ValueError, match=r"another configuration \(seed: 0 -> 1\): use another"):
    provenance.check_configuration(tmp_path, CONFIG | dict(seed=1))
  provenance.check_configuration(tmp_path, CONFIG | dict(seed=1, resume="force"))


def test_an_evaluation_in_the_directory_of_a_run_is_told_how_to_evaluate_it(tmp_path):
  provenance.record(tmp_path, CONFIG | dict(job="rl"))
  message = rf"use another --workdir with --config\.weights={tmp_path} to evaluate this run, or"
  with pytest.raises(ValueError, match=message):
    provenance.check_configuration(tmp_path, CONFIG | dict(job="eval"))
  provenance.record(tmp_path, CONFIG | dict(job="eval"))  # Has no checkpoint to evaluate.
  with pytest.raises(ValueError, match="use another --workdir, or"):
    provenance.check_configuration(tmp_path, CONFIG | dict(job="eval", seed=1))


def test_a_key_newer_than_the_run_had_its_default(tmp_path):
  provenance.record(tmp_path, CONFIG)
  provenance.check_configuration(tmp_path, CONFIG | dict(engine=dict(weights_dtype="")))
  with pytest.raises(ValueError, match=r"engine\.weights_dtype: '' -> 'int8'"):
    provenance.check_configuration(tmp_path, CONFIG | dict(engine=dict(weights_dtype="int8")))


def test_a_continued_run_prints_changed_keys(tmp_path, capsys):
  provenance.record(tmp_path, CONFIG)
  provenance.record(tmp_path, CONFIG)
  assert "another" not in capsys.readouterr().err
  longer = CONFIG | dict(resume="force", seed=1, distillation=dict(teacher=""))
  for run, times in ((longer, 1), (longer, 0), (CONFIG, 1)):
    provenance.record(tmp_path, run)
    stderr = capsys.readouterr().err
    assert stderr.count("this run resumes with another seed: ") == times
    assert stderr.count("another distillation.teacher: ") == times and "resume: " not in stderr
  assert "another seed: 1 -> 0\n" in stderr


def test_the_origins_of_a_run_are_recorded(tmp_path):
  recorded = provenance.read(tmp_path)
  assert provenance.recorded_origins(recorded, CONFIG)["start"] == {}
  provenance.record(tmp_path, CONFIG, START, TEACHER)
  recorded = provenance.read(tmp_path)
  assert provenance.recorded_origins(recorded, CONFIG)["start"] == START
  assert provenance.recorded_origins(recorded, CONFIG)["teacher"] == TEACHER
  assert provenance.recorded_origins(recorded, CONFIG | dict(weights="OTHER"))["start"] == {}


def test_the_date_of_the_first_start_is_kept(tmp_path):
  start = datetime.datetime(2024, 2, 28, 23, 59, 58)
  assert provenance.first_start({}) > start
  provenance.record(tmp_path, CONFIG)
  recorded = provenance.read(tmp_path)
  assert provenance.first_start(recorded) > start  # An older run, without a date.
  provenance.record(tmp_path, CONFIG, date=start)
  for _ in range(2):
    recorded = provenance.read(tmp_path)
    assert provenance.first_start(recorded) == start
    provenance.record(tmp_path, CONFIG, date=provenance.first_start(recorded))
  path = tmp_path / provenance.FILE
  path.write_text(path.read_text().replace("2024-02-28", "yesterday"))
  with pytest.raises(ValueError, match=r"damaged \(provenance.date='yesterday"):
    provenance.first_start(provenance.read(tmp_path))


def test_other_contents_of_the_same_names_are_refused(tmp_path, capsys):
  old = {"reward.name": "source 1", "weights": "2 files 3", "data.eval": "5 problems 6"}
  new = old | {"weights": "2 files 4", "environment.name": "source 7"}
  provenance.check_contents(tmp_path, CONFIG, new)  # A new run.
  provenance.record(tmp_path, CONFIG)
  provenance.check_contents(tmp_path, CONFIG, new)  # A run without descriptions.
  provenance.record(tmp_path, CONFIG, contents=old)
  provenance.check_contents(tmp_path, CONFIG, old)
  message = r"other contents of weights: '2 files 3' -> '2 files 4': restore the old contents"
  with pytest.raises(ValueError, match=message):
    provenance.check_contents(tmp_path, CONFIG, new)
  forced = CONFIG | dict(resume="force")
  provenance.check_contents(tmp_path, forced, new)
  assert "another" not in capsys.readouterr().err
  provenance.record(tmp_path, forced, contents=new)
  message = "this run resumes with another weights: '2 files 3' -> '2 files 4'\n"
  assert capsys.readouterr().err == message
  provenance.check_contents(tmp_path, CONFIG, new)
