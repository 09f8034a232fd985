"""The documentation beyond its examples, which run as doctests."""

import re

from mirrorquant import methods


def test_the_documentation_lists_the_methods(pytestconfig):
    table = (pytestconfig.rootpath / "docs" / "methods.md").read_text().split("\n\n")[1]
    assert set(re.findall(r"^\| `([\w-]+)`", table, re.M)) == set(methods.names())
