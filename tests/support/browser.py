"""A headless browser for tests of pages."""

import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROME = next(filter(None, map(shutil.which, NAMES)), None)
SECONDS = 30


class Browser:
  """One headless page, driven over the DevTools protocol on two pipes: no port, no package."""

  def __init__(self, profile):
    to_child, self._out = os.pipe()
    self._in, from_child = os.pipe()
    # The browser speaks on its descriptors 3 and 4. Out of their way first, lest putting one in its
    # place closes the other.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_child, from_child)]
    command = [
      CHROME, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
      "--disable-background-networking", "--disable-component-update", "--disable-sync",
      f"--user-data-dir={profile}", "--remote-debugging-pipe", "--window-size=1400,900",
    ]  # fmt: skip
    place = "import os, sys; a, b, *c = sys.argv[1:]"
    place += "; os.dup2(int(a), 3); os.dup2(int(b), 4); os.execv(c[0], c)"
    self._process = subprocess.Popen(
      [sys.executable, "-S", "-c", place, *map(str, high), *command],
      pass_fds=high, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for fd in (to_child, from_child, *high):
      os.close(fd)
    self._numbers, self._buffer, self._session = itertools.count(1), b"", {}
    self.errors = []
    target = self.call("Target.createTarget", url="about:blank")["targetId"]
    session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    self._session = {"sessionId": session}
    for domain in ("Page", "Runtime", "Log"):
      self.call(f"{domain}.enable")

  def close(self):
    self._process.terminate()
    self._process.wait(SECONDS)
    os.close(self._in)
    os.close(self._out)

  def call(self, method, **parameters):
    number = next(self._numbers)
    message = {"id": number, "method": method, "params": parameters, **self._session}
    os.write(self._out, json.dumps(message).encode() + b"\0")
    while True:
      answer = self._read()
      if answer.get("id") == number:
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]
      self._note(answer)

  def evaluate(self, expression):
    answer = self.call(
      "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
    )
    assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
    return answer["result"].get("value")

  def wait(self, expression):
    deadline = time.monotonic() + SECONDS
    while not (value := self.evaluate(expression)):
      assert time.monotonic() < deadline, f"never came true: {expression}"
      time.sleep(0.02)
    return value

  def open(self, path, place=""):
    """Loads a page anew, at a place such as "#responses"."""
    self.call("Page.navigate", url="about:blank")
    # What is under the pointer is read, even where it rests since another test.
    self.call("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)
    self.errors = []
    self.call("Page.navigate", url=path.as_uri() + place)
    self.wait("document.documentElement?.dataset.ready === 'yes'")
    self._frame()  # Charts report their reading in it.

  def point(self, x, y):
    """Moves the pointer and waits for the page: input is asynchronous."""
    self._frame()  # in which the page hears of a scroll before this, and hides what is pointed at
    self.evaluate("delete document.documentElement.dataset.pointed")
    self.evaluate(f"""addEventListener("mousemove", function seen(event) {{
      if (Math.hypot(event.clientX - {x}, event.clientY - {y}) > 1) return;
      removeEventListener("mousemove", seen, true);
      document.documentElement.dataset.pointed = "{x},{y}";
    }}, true)""")
    self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    self.wait(f"document.documentElement.dataset.pointed === '{x},{y}'")
    self._frame()

  def _frame(self):
    self.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))")

  def _read(self):
    deadline = time.monotonic() + SECONDS
    while b"\0" not in self._buffer:
      ready, _, _ = select.select([self._in], [], [], max(0, deadline - time.monotonic()))
      assert ready, "the browser does not answer"
      chunk = os.read(self._in, 1 << 20)
      assert chunk, f"the browser ended with {self._process.poll()}"
      self._buffer += chunk
    message, _, self._buffer = self._buffer.partition(b"\0")
    return json.loads(message)

  def _note(self, event):
    kind, details = event.get("method"), event.get("params")
    if kind in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
      self.errors.append(details)

  def press(self, key):
    """A key, as a user presses it."""
    text = {"text": key} if len(key) == 1 else {}
    self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
    self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
    self.evaluate("new Promise((done) => setTimeout(done, 80))")

  def choose(self, name, value):
    """Sets a filter as a user does and waits until the responses are drawn again."""
    self.evaluate(f"""(() => {{
      const box = document.querySelector('[name="{name}"]');
      box.value = {json.dumps(value)};
      box.dispatchEvent(new Event(box.tagName === "SELECT" ? "change" : "input"));
      return new Promise((done) => setTimeout(done, 250));
    }})()""")

  def texts(self, selector):
    return self.evaluate(
      f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.textContent)"
    )

  def figure(self, title, part):
    """Evaluates an expression of the chart `f` with this title."""
    return self.evaluate(f"""(() => {{
      const titled = (f) => f.querySelector("h3").textContent === {json.dumps(title)};
      const f = [...document.querySelectorAll("figure")].find(titled);
      return {part};
    }})()""")

  def point_at_step(self, step, title):
    """Moves the pointer over a chart of the steps 1 to 20."""
    self.figure(title, "f.scrollIntoView({ block: 'center' })")
    box = self.figure(title, "f.querySelector('.curve').getBoundingClientRect().toJSON()")
    self.point(box["x"] + box["width"] * (step - 1) / 19, box["y"] + box["height"] / 2)

  def box(self, node):
    """Scrolls a node to the middle of the screen and returns its box."""
    self.evaluate(f"{node}.scrollIntoView({{ block: 'center' }})")
    return self.evaluate(f"{node}.getBoundingClientRect().toJSON()")

  @contextlib.contextmanager
  def screen(self, width, height, scheme=""):
    """Emulates another screen and colour scheme."""
    size = dict(width=width, height=height, deviceScaleFactor=1, mobile=False)
    self.call("Emulation.setDeviceMetricsOverride", **size)
    prefers = dict(name="prefers-color-scheme", value=scheme)
    self.call("Emulation.setEmulatedMedia", features=[prefers])
    try:
      yield
    finally:
      self.call("Emulation.clearDeviceMetricsOverride")
      self.call("Emulation.setEmulatedMedia", features=[])
