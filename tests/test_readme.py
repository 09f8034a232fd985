"""The documentation beyond its examples, which run as doctests."""

import re

import mirrorquant as mq
from mirrorquant import methods


def test_the_documentation_lists_the_methods(pytestconfig):
    table = (pytestconfig.rootpath / "docs" / "methods.md").read_text().split("\n\n")[1]
    own = {name for name in methods.names() if methods.get(name).__module__.startswith("mirrorquant.")}
    assert set(re.findall(r"^\| `([\w-]+)`", table, re.M)) == own  # other tests may have registered theirs


def test_the_network_that_the_readme_names_is_the_one_of_its_table(pytestconfig):
    readme = (pytestconfig.rootpath / "README.md").read_text()
    file = pytestconfig.rootpath / "networks" / "cifar10-resnet18-binary.safetensors"
    row = next(line for line in readme.splitlines() if line.startswith("| CIFAR-10, ResNet-18 "))
    assert file.name in readme
    assert f"{file.stat().st_size / 1e6:.2f} MB" in row
    rows = mq.summary(mq.load(file)).rows
    floats = {row.name.rpartition(".")[2] for row in rows if row.levels != [-1.0, 1.0] or row.bits != 1}
    assert floats == {"running_mean", "running_var", "num_batches_tracked"}  # what batch norm counts
    assert sum(row.count for row in rows if row.bits == 1) == 11_164_362
