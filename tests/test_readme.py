"""The documentation beyond its examples, which run as doctests."""

import re

from mirrorquant import methods


def test_the_documentation_lists_the_methods(pytestconfig):
    table = (pytestconfig.rootpath / "docs" / "methods.md").read_text().split("\n\n")[1]
    own = {name for name in methods.names() if methods.get(name).__module__.startswith("mirrorquant.")}
    assert set(re.findall(r"^\| `([\w-]+)`", table, re.M)) == own  # other tests may have registered theirs
