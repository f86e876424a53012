"""Which responses a report holds, and how their tokens are written."""

import time

import pytest
from support.reported_runs import record, write

from gspo_jax.report.rollouts import read_rollouts

WORDS = [f" word{i}" for i in range(5000)]


def colored(step, prompt, tokens, ratios, **changes):
  return record(step, prompt, 0, tokens=tokens, log_ratio=ratios, **changes)


def read_records(folder, records, *limits):
  steps = sorted({r["step"] for r in records})
  write(folder, dumps=[("rl", step, [r for r in records if r["step"] == step]) for step in steps])
  rollouts = read_rollouts([folder / "rollouts"], *limits)
  return rollouts["colors"], [s for g in rollouts["groups"] for s in g["samples"]]


@pytest.mark.parametrize("limit", [1, 8, 12, 100])
def test_at_most_max_rollouts_spread_over_the_run(tmp_path, limit):
  dumps = [("rl", n, [record(n, p, i) for p in range(5) for i in range(4)]) for n in range(1, 11)]
  run = write(tmp_path, dumps=dumps)
  rollouts = read_rollouts([run / "rollouts"], limit)
  groups = rollouts["groups"]
  count = sum(len(group["samples"]) for group in groups)
  assert rollouts["total"] == 200 and limit // 2 <= count <= limit
  assert groups[-1]["step"] == 10  # the newest dump is always among them
  assert len({group["step"] for group in groups}) == min(10, limit)


def test_long_responses_are_shortened_and_say_so(tmp_path):
  text = "start" + "." * 50_000 + "end"
  _, (sample,) = read_records(tmp_path, [record(1, 1, 0, response=text)], 10)
  shown = sample["response"]
  assert len(shown) < 5000 and shown.startswith("start") and shown.endswith("end")
  assert "46,008 characters left out" in shown


def test_prompts_of_two_benchmarks_with_one_id_stay_apart(tmp_path):
  names = "aime24", "aime25"
  records = [record(1, 1, 0, eval=True, benchmark=name, response=name) for name in names]
  run = write(tmp_path, dumps=[("eval", 1, records)])
  groups = read_rollouts([run / "rollouts"], 10)["groups"]
  assert [(g["benchmark"], g["samples"][0]["response"]) for g in groups] == [*zip(names, names)]


def test_a_response_without_a_verdict_has_a_reason_instead_of_a_reward(tmp_path):
  unknown = record(1, 1, 0, reward=0.0, eval=True, unknown="timeout: 1 s")
  _, (sample,) = read_records(tmp_path, [unknown], 10)
  assert "reward" not in sample and sample["unknown"] == "timeout: 1 s"


def test_what_would_not_be_seen_is_spelled_out(tmp_path):
  tokens = ["a\u202eb", "\x1b[2J\t\n", "\u2066 é \ud800\u200b"]
  visible = ["a\\u202eb", "\\x1b[2J\t\n", "\\u2066 é \\ud800\\u200b"]
  plain, whole = record(1, 1, 0, response="".join(tokens)), "".join(visible)
  _, (sample,) = read_records(tmp_path / "plain", [plain], 10)
  assert sample["response"] == whole
  marked = colored(1, 1, tokens, [0.1, 0.2, 0.3], response="".join(tokens))
  _, (sample,) = read_records(tmp_path / "colored", [marked], 10)
  assert sample["tokens"] == visible and "response" not in sample


def test_tokens_that_make_up_the_response_stand_for_it(tmp_path):
  tokens = ["né", "\n", "😀!", ""]
  ratios = [0.0123456, -0.02, None, float("nan")]
  record = colored(1, 1, tokens, ratios, response="".join(tokens))
  colors, (sample,) = read_records(tmp_path, [record], 10)
  assert sample["tokens"] == tokens and "response" not in sample
  values = [v * colors["unit"] for v in sample["log_ratio"][:2]]
  assert values == pytest.approx([0.0123456, -0.02], rel=1e-3)
  assert sample["log_ratio"][2:] == [None, None] and max(map(abs, sample["log_ratio"][:2])) < 1e5
  assert colors["scale"] == pytest.approx(0.02, rel=0.05) and colors["colored"] == 1


def test_tokens_that_do_not_make_up_the_response_keep_their_texts(tmp_path):
  records = [colored(1, 1, ["\ufffd", "\ufffd", "<end>"], [0.0, 0.0, 0.0], response="é")]
  colors, (sample,) = read_records(tmp_path, records, 10)
  assert sample["tokens"] == ["\ufffd", "\ufffd", "<end>"] and sample["response"] == "é"
  assert sample["log_ratio"] == [0, 0, 0] and colors["scale"] > 0


def test_tokens_of_a_long_response_are_cut_where_it_is(tmp_path):
  record = colored(1, 1, WORDS, [i / 5000 for i in range(5000)], response="".join(WORDS))
  colors, (sample,) = read_records(tmp_path, [record], 10)
  shown, values = sample["tokens"], sample["log_ratio"]
  assert len("".join(shown)) < 4100 and shown[-1] == " word4999"
  assert len(shown) == len(values)
  assert "left out" in shown[values.index(None)]
  assert values[-1] * colors["unit"] == pytest.approx(4999 / 5000, rel=1e-3)


def test_turns_of_a_conversation_stay_apart(tmp_path):
  def turn(text, role="policy"):
    return dict(role=role, text=text, length=len(text))

  turns = [turn("ab"), turn("<tool>", "environment"), turn("c$")]
  fields = dict(response="ab<tool>c", turns=turns)
  ratios = [0.1, 0.2, 0.3, 0.4]
  records = [
    colored(1, 1, [*"abc$"], ratios, clipped_tokens=[1, 0, 1, 0], **fields),
    colored(1, 2, [*"abc", ""], ratios, **fields),  # The name of `$` is dropped in decoding.
    record(1, 3, 0, **fields),
    colored(1, 4, [*"abc"], ratios[:3], **fields),  # Turns of other tokens.
    record(1, 5, 0, **fields | dict(turns=[7])),
  ]
  _, samples = read_records(tmp_path, records, 100)
  texts = [["ab", False], ["<tool>", True], ["c$", False]]
  assert samples[0]["tokens"] == ["a", "b", "<tool>", "c", "$"]
  assert samples[0]["observations"] == [2] and samples[0]["log_ratio"][2] is None
  assert samples[0]["clipped_tokens"] == [1, 0, 0, 1, 0] and "turns" not in samples[0]
  assert samples[1]["turns"] == samples[2]["turns"] == texts and samples[1]["observations"] == [2]
  assert not any("response" in sample for sample in samples[:3])
  assert [sample.get("response") for sample in samples[3:]] == ["ab<tool>c"] * 2
  assert "turns" not in samples[3] and "observations" not in samples[3]


def test_long_turns_are_shortened_each(tmp_path):
  turns = [dict(role="policy", text="a" * 9000, length=9000)]
  turns += [dict(role="environment", text="b", length=1)] * 3
  (_, (sample,)) = read_records(tmp_path, [record(1, 1, 0, turns=turns)], 10)
  assert len(sample["turns"][0][0]) < 1100 and sample["turns"][3] == ["b", True]


def test_a_prompt_is_shown_with_its_template_once(tmp_path):
  records = [record(1, 1, i) | dict(prompt="1+1") for i in range(3)]
  records[0]["rendered_prompt"], records[2]["rendered_prompt"] = "<user>1+1<end>", "<user>2+2<end>"
  records.append(record(1, 2, 0) | dict(prompt="1+1", rendered_prompt="1+1"))
  write(tmp_path, dumps=[("rl", 1, records)])
  groups = read_rollouts([tmp_path / "rollouts"], 100)["groups"]
  assert [group["rendered"] for group in groups] == ["<user>1+1<end>", ""]
  prompts = [sample.get("rendered") for sample in groups[0]["samples"]]
  assert prompts == [None, None, "<user>2+2<end>"]


def test_clipped_tokens_are_marked_where_they_are(tmp_path):
  flags = [int(i in (1, 2500, 4999)) for i in range(5000)]
  whole = colored(1, 1, WORDS, [0.1] * 5000, response="".join(WORDS), clipped_tokens=flags)
  short = [
    colored(1, 2, ["4", "2"], [0.1, 0.2], response="42", clipped_tokens=[1, 0]),
    colored(1, 3, ["4", "2"], [0.1, 0.2], response="42", clipped_tokens=[1]),  # Another type.
    colored(1, 4, ["4", "2"], [0.1, 0.2], response="42"),
  ]
  colors, (long, marked, *unknown) = read_records(tmp_path, [whole, *short], 10)
  marks = long["clipped_tokens"]
  assert len(marks) == len(long["tokens"]) < 5000
  assert [i for i, mark in enumerate(marks) if mark] == [1, len(marks) - 1]
  assert marked["clipped_tokens"] == [1, 0] and colors["clipped"]
  assert not any("clipped_tokens" in sample for sample in unknown)
  (tmp_path / "none").mkdir()
  assert not read_records(tmp_path / "none", short[1:], 10)[0]["clipped"]


def test_segments_are_shown_with_what_is_known_of_them(tmp_path):
  numbers = [i // 100 for i in range(5000)]
  figures = dict(
    segment_ratio=[1 + n / 1000 for n in range(50)], segment_gradient=[n / 7 for n in range(50)]
  )
  whole = colored(1, 1, WORDS, [0.1] * 5000, response="".join(WORDS), segments=numbers, **figures)
  short = dict(segments=[0, 1], segment_ratio=[1.0, 0.9], segment_gradient=[0.5, 0.0])
  broken = [
    {}, dict(segments=[0]), dict(segments=[0, 2]), dict(segments=[0, True]),
    dict(segments=[0, None]), dict(segments=7), dict(segment_ratio=[1.0, "x"]),
    dict(segment_gradient=[1.0, float("nan")]), dict(segment_gradient=[1.0]),
  ]  # fmt: skip
  records = [
    colored(1, p, ["4", "2"], [0.1, 0.2], response="42", **(short | changes if changes else {}))
    for p, changes in enumerate([dict(length=2), *broken], 2)
  ]
  colors, (long, two, *unknown) = read_records(tmp_path, [whole, *records], 100)
  assert colors["segments"] and len(long["segments"]) == len(long["tokens"]) < 5000
  gap = long["segments"].index(None)
  assert "left out" in long["tokens"][gap]
  assert long["segments"][:gap] == numbers[:gap]
  assert long["segments"][gap + 1 :] == numbers[gap + 1 - len(long["tokens"]) :]
  shown = {*long["segments"]} - {None}
  assert long["segment_figures"] == {n: (1 + n / 1000, n / 7) for n in shown} and len(shown) < 50
  assert two["segment_figures"] == {0: (1.0, 0.5), 1: (0.9, 0.0)} and two["segments"] == [0, 1]
  assert len(unknown) == len(broken) and not any("segments" in sample for sample in unknown)
  (tmp_path / "none").mkdir()
  assert not read_records(tmp_path / "none", records[1:], 100)[0]["segments"]


def test_as_many_segments_as_tokens_take_linear_time(tmp_path):
  n = 16_000
  figures = dict(segment_ratio=[1.0] * n, segment_gradient=[0.5] * n)
  tokens, zeros = ["a"] * n, [0.0] * n
  record = colored(1, 1, tokens, zeros, response="a" * n, segments=[*range(n)], **figures)
  begin = time.process_time()
  (sample,) = read_records(tmp_path, [record], 10)[1]
  assert len(sample["segment_figures"]) == len(sample["tokens"]) - 1
  assert time.process_time() - begin < 2


def test_the_newest_tokens_get_the_room_there_is(tmp_path):
  records = [colored(step, p, ["4", "2"], [0.1, 0.2]) for step in range(1, 7) for p in range(2)]
  colors, samples = read_records(tmp_path, records, 100, 7)
  assert ["log_ratio" in sample for sample in samples] == [False] * 8 + [True, False, True, True]
  assert (colors["colored"], colors["known"]) == (3, 12)
  texts = [sample.get("response") or "".join(sample["tokens"]) for sample in samples]
  assert texts == ["42"] * 12


def test_records_without_or_with_broken_ratios_stay_plain(tmp_path):
  records = [
    record(1, 1, 0),
    colored(1, 2, ["4", "2"], [0.1]),
    record(1, 3, 0, ratio=float("inf"), tokens=["4"]),
  ]
  colors, samples = read_records(tmp_path, records, 10)
  assert not any({"log_ratio", "tokens", "ratio"} & set(sample) for sample in samples)
  assert colors["colored"] == colors["known"] == 0


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(prompt=None), "response 2 has prompt=None"),
    (dict(response=7), "response 2 has response=7"),
    (dict(prompt_id=[1]), r"response 2 has prompt_id=\[1\]"),
  ],
)
def test_a_response_without_its_texts_is_named(tmp_path, changes, message):
  records = [record(1, 1, 0), record(1, 1, 1) | changes]
  with pytest.raises(ValueError, match=f"rl_.*1.jsonl: {message}"):
    read_records(tmp_path, records, 10)


@pytest.mark.parametrize(
  "changes",
  [
    dict(tokens=7, log_ratio=[0.1]), dict(tokens=[7], log_ratio=[0.1]), dict(tokens="a"),
    dict(tokens=["a"], log_ratio=["x"]), dict(tokens=["a"], log_ratio=[0.1], clipped_tokens=7),
    dict(reward=[1], advantage={}, ratio="x"),
  ],
)  # fmt: skip
def test_odd_figures_of_a_response_do_not_cost_the_page(tmp_path, changes):
  _, (sample,) = read_records(tmp_path, [record(1, 1, 0, response="a") | changes], 10)
  assert sample.get("response", "a") == "a" and not isinstance(sample.get("reward"), list)
