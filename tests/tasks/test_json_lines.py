"""Problems of embedded tasks as JSON lines."""

import json

import pytest
from support.configs import config_of

from configs import tiny, tiny_long
from gspo_jax.data import sources
from gspo_jax.data.tokenizer import ByteTokenizer
from gspo_jax.tasks.__main__ import main


def written(capsys, *argv):
  main(list(argv))
  return capsys.readouterr().out


@pytest.mark.parametrize("task, make", [("arithmetic", tiny), ("recurrence", tiny_long)], ids=str)
def test_rows_are_problems_of_the_task_and_other_numbers_are_others(task, make, tmp_path, capsys):
  source = f"{task}:train"
  text = written(capsys, source, "--rows=5") + written(capsys, source, "--first=5", "--rows=7")
  assert text == written(capsys, source, "--rows=12"), "the same order whenever it is called"
  (tmp_path / "rows.jsonl").write_text(text)
  data = config_of(make.get_config, data__train=str(tmp_path / "rows.jsonl")).data
  prompts = sources.load(data, ByteTokenizer(), "train")
  assert len({prompt.id for prompt in prompts}) == 12, "no row twice"
  fields = [dict(id=p.id, question=p.question, answer=p.answer) for p in prompts]
  assert fields == list(map(json.loads, text.splitlines()))


@pytest.mark.parametrize(
  "argv, message",
  [
    ("calculator:train", "no task 'calculator'"),
    ("word_problems:test", "word_problems:train and word_problems:heldout"),
    ("arithmetic:test", "arithmetic:train and arithmetic:heldout"),
    ("arithmetic:train --digits=1 --rows=99", "--rows=99: there are 79 rows"),
    ("arithmetic:train --first=-1", "--first=-1"),
    ("arithmetic:train --rows=0", "--rows=0"),
    ("recurrence:train --lines=0", "--lines=0: a response has 1 to 128 lines"),
    ("recurrence:train --lines=8,129", "1 to 128 lines"),
  ],
)
def test_what_there_is_not_is_refused(argv, message, capsys):
  with pytest.raises(SystemExit):
    main(argv.split())
  assert message in capsys.readouterr().err
