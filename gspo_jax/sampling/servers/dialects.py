"""Dialects: what is sent to a server, and how its answers are read. No request is made here."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from gspo_jax.sampling.servers.calls import Call, Part


@dataclasses.dataclass(frozen=True)
class Ask:
  """One HTTP request and what its answer must hold."""

  path: str
  body: Mapping[str, Any] | None = None  # None: GET
  # Keys of the answer with the values that they must have
  holds: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Dialect:
  """A record of functions in which servers differ.

  Attributes:
    generate: the path of a call and its body.
    read: from the answer to the parts of the call, in the order of its samples; raises `Failed`.
    publish: requests, one after the other, after which a server has the weights of a directory.
    release: what lets a server go on that was stopped for new weights, whatever came between.
    label: tells a server that was just started which version its weights are.
    abort: leaves the calls of these ids, whose answers then come with what they have.
    settings: where a server says how it was started.
    unfit: why a server with these settings cannot be used; "": it can, or does not say.
    processed: what makes its log-probs those after the temperature.
  """

  name: str
  generate: Callable[[Call], Ask]
  read: Callable[[Mapping[str, Any], Call], list[Part]]
  publish: Callable[[str, int], list[Ask]]
  release: Ask
  label: Callable[[int], Ask]
  abort: Callable[[list[str]], list[Ask]]
  settings: Ask
  unfit: Callable[[Mapping[str, Any], bool], str]
  processed: str
