"""What the README says beyond its examples, which run as doctests."""

import re

from conftest import METHODS


def test_the_readmes_table_lists_the_methods(pytestconfig):
    readme = (pytestconfig.rootpath / "README.md").read_text()
    table = readme.split("## Methods")[1].split("\n\n")[1]
    assert set(re.findall(r"^\| `([\w-]+)`", table, re.M)) == {"ref", *METHODS}
