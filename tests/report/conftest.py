"""A browser for the tests of pages."""

import pytest
from support.browser import Browser


@pytest.fixture(scope="package")
def browser(tmp_path_factory):
  browser = Browser(tmp_path_factory.mktemp("profile"))
  yield browser
  browser.close()


@pytest.fixture
def tab(browser):
  """The browser; no script of the test's page may have failed or said anything."""
  yield browser
  browser.evaluate("0")  # Its reports come before this answer.
  assert browser.errors == []
