"""The tables hold the numbers of the summaries, mark what falls short, and hide nothing."""

import json
import math
import re
import sys
from pathlib import Path

import pytest

from mirrorquant.report import RecordError, RunRecord, labels, plots, tables
from mirrorquant.train import recipes
from mirrorquant.train.config import rescaled

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import paper_tables  # noqa: E402


def summary(recipe, accuracy, seed=0, paper=None, overrides=None):
    config = rescaled(recipes.get(recipe or "digits/digitsnet/binary/md-tanh-s"), overrides or {})
    config["iterations"] = (overrides or config).get("iterations", config["iterations"])
    return {
        "recipe": recipe,
        "config": {"version": 2, **config, "seed": seed},
        "overrides": overrides or {},
        "paper": paper,
        "val_accuracy": 99.0,
        "test_accuracy": accuracy,
        "test_accuracy_soft": accuracy + 0.25,
        "seconds": 250.0 + 20 * seed,
        "iterations_per_second": 400.0,
        "versions": {"mirrorquant": "0.1", "torch": "2.13.0", "python": "3.11", "device": "NVIDIA H200"},
        "parameters": {"total": 10, "quantized": 10, "bits": 1.0},
    }


def row(content):
    return tables.compare_row(RunRecord.of(content))


@pytest.fixture
def put_all(tmp_path):
    """Writes summaries as the training does; returns the text made of all of them."""

    def write(*summaries):
        for index, content in enumerate(summaries):
            (tmp_path / f"run{index}.json").write_text(json.dumps(content))
        return paper_tables.results_table(tmp_path)

    return write


@pytest.fixture
def put(put_all):
    """The same without the ImageNet tables, which are always there."""
    return lambda *summaries: re.sub(
        r"## ImageNet\n.*?(?=^(## |†|Made with))", "", put_all(*summaries), flags=re.M | re.S
    )


def cells(text, method):
    """The rows of a method that has runs, as lists of cells; it may have the number of a note."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in rows if row[0].rstrip(" ¹²³") == method and row[2:3] != ["-"]]


MD = "cifar10/resnet18/binary/md-tanh-s"


def test_seeds_are_averaged_and_compared_with_the_paper(put):
    text = put(*(summary(MD, accuracy, seed, 93.18) for seed, accuracy in enumerate((93.0, 93.2, 93.7))))
    expected = ["MD-tanh-S", "93.18", "93.30 ± 0.36 (n = 3)", "+0.12", "0, 1, 2", "400", "4.5"]
    assert cells(text, "MD-tanh-S") == [expected]
    assert "## Binary weights (tab:res_binary)\n\n### CIFAR-10, ResNet-18" in text
    assert "†" not in text
    assert "mirrorquant 0.1, torch 2.13.0, NVIDIA H200" in text


@pytest.mark.parametrize(("accuracy", "cell"), [(92.58, "-0.60"), (92.57, "-0.61 †"), (93.18, "+0.00")])
def test_more_than_six_tenths_below_the_paper_is_marked(put, accuracy, cell):
    text = put(summary(MD, accuracy, paper=93.18))
    assert cells(text, "MD-tanh-S")[0][2:4] == [f"{accuracy:.2f}", cell]
    assert text.count("†") == (2 if "†" in cell else 0)


def test_the_mark_links_the_findings_where_there_are_any(put, tmp_path):
    assert "findings" not in put(summary(MD, 90.0, paper=93.18))
    (tmp_path / "findings.md").write_text("# Findings")
    assert "† more than 0.6 points below the paper; [findings.md](findings.md)" in put(summary(MD, 90.0, paper=93.18))


def test_tables_columns_and_rows_are_in_the_order_of_the_paper(put):
    names = ["cifar100/vgg16/ternary/md-tanh-s", "cifar10/mobilenetv2/binary/bc", MD, "cifar10/resnet18/binary/pq-star"]
    names += ["tinyimagenet/resnet18/binary/bc", "cifar10/resnet18/ref", "cifar10/vgg16/binary/bc"]
    text = put(*(summary(name, 50.0, paper=50.0) for name in names))
    assert re.findall(r"^#+ (.*)$", text, re.M) == [
        "Results",
        "Binary weights (tab:res_binary)",
        *("CIFAR-10, VGG-16", "CIFAR-10, ResNet-18", "TinyImageNet, ResNet-18"),
        *("Binary weights, MobileNetV2 (tab:res_mobilenet_bracewell)", "CIFAR-10, MobileNetV2"),
        *("Ternary weights (tab:res_ternary)", "CIFAR-100, VGG-16"),
    ]
    block = text.split("CIFAR-10, ResNet-18")[1].split("###")[0]
    rows = [["REF", "50.00"], ["BC", "-"], ["PQ", "-"], [r"PQ\*", "50.00"], ["PMF", "-"], [r"PMF\*", "-"]]
    rows += [["GD-tanh", "-"], ["MD-softmax", "-"], ["MD-tanh", "-"], ["MD-softmax-S", "-"], ["MD-tanh-S", "50.00"]]
    assert [[a, b] for a, b in re.findall(r"^\| (\S+).*?\| +\d\S+ \| +(\S+)", block, re.M)] == rows
    assert "official validation set" in text.split("### TinyImageNet")[1].split("##")[0]
    assert r"¹ The paper does not print hyperparameters of binary PQ\*: these are PQ's." in block
    assert text.count("No runs yet: ") == 3
    assert "\n\nNo runs yet: CIFAR-100, MobileNetV2.\n\n" in text


def test_the_float_network_stands_in_the_ternary_table_beside_ternary_runs(put):
    runs = [summary(f"cifar10/resnet18/{name}", 93.0, paper=93.0) for name in ("ref", "ternary/pq")]
    text = put(*runs)
    assert len(cells(text, "REF (float)")) == 2
    assert len(cells(text, "PQ")) == 1


NET = "imagenet/resnet18/binary/md-tanh-s"
IMAGENET = {
    "tab:res_imagenet": """
        REF (float)         70.61  89.40
        BWN*                60.80  83.00
        BR                  63.20  85.10
        ELQ                 64.72  86.04
        ADMM                64.80  86.20
        QN                  66.50  87.03
        MD-tanh-S*⁺         56.67  79.66
        MD-tanh-S*          65.92  86.29
        MD-tanh-S           66.78  87.01
    """,
    "tab:res_imagenet_abl": """
        yes  float   float   float  no   66.78  87.01
        no   float   float   float  no   65.92  86.29
        yes  binary  float   float  no   60.39  82.77
        no   binary  float   float  no   59.92  82.42
        yes  binary  binary  float  no   56.60  79.79
        no   binary  binary  float  no   56.67  79.66
        yes  binary  float   float  yes  61.91  83.87
        yes  binary  binary  float  yes  56.05  79.69
    """,
    "tab:res_imagenet_binarywtact": """
        REF (float)         70.6   89.4
        BinaryNet           42.2   67.1
        Dorefa-Net          52.5   76.7
        XNOR-Net            51.2   73.2
        Bireal-Net          56.4   79.5
        Bireal-Net (PReLU)  59.0   81.3
        PCNN (J=1)          57.3   80.0
        QN                  53.6   75.3
        BOP                 54.2   77.2
        GBCN                57.8   80.9
        IR-Net              58.1   80.0
        Noisy Supervision   59.4   81.7
        MD-tanh-S           60.3   82.3
        MD-tanh-S (KL div. loss)  62.8  84.3
    """,
}


def imagenet_rows(text, table):
    """The cells of an ImageNet table."""
    lines = text.split(f"({table})\n")[1].split("\n#")[0].replace("\\*", "*").splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line[:1] == "|"][2:]


@pytest.mark.parametrize("table", IMAGENET)
def test_all_rows_of_the_imagenet_tables_are_there_without_any_run(put_all, table):
    text = put_all()
    rows = imagenet_rows(text, table)
    printed = [re.split("  +", line.strip()) for line in IMAGENET[table].strip().splitlines()]
    assert [row[:-3] for row in rows] == printed
    assert {cell for row in rows for cell in row[-3:-1]} == {"-"}
    cited = [row[0] for row in rows if row[-1] == "-"]
    assert cited == [row[0] for row in printed if not row[0].startswith(("REF", "MD-tanh-S", "yes", "no"))]
    assert text.count("ImageNet itself was not available to us") == 1


def test_a_run_on_imagenet_stands_in_all_its_rows(put_all):
    full = [{**summary(f"{NET}-full", 56.0 + k, k, 56.67), "test_top5": 79.0 + k} for k in (0, 1)]
    scratch = {**summary(NET, 65.0, paper=65.92), "test_top5": 86.5}
    text = put_all(*full, scratch, summary("imagenet/resnet34/ref", 73.3))
    expected = {f"`{NET}`": ["65.00 †", "86.50"], f"`{NET}-full`": ["56.50 ± 0.71 (n = 2)", "79.50 ± 0.71 (n = 2)"]}
    for table, found in zip(IMAGENET, (expected, expected, {}), strict=True):
        assert {row[-1]: row[-3:-1] for row in imagenet_rows(text, table) if row[-2] != "-"} == found
    assert "not available" not in text
    assert text.count("†") == 3
    outside = text.split("## Not in the paper\n\n### ImageNet, ResNet-34\n")[1]
    assert cells(outside, "REF (float)")[0][:3] == ["REF (float)", "float", "73.30"]
    assert "Bi-Real" not in outside


def test_variants_of_a_method_follow_it_outside_the_paper(put):
    names = ["binary/md-tanh-s-pretrained", "ref", "binary/md-tanh-s"]
    runs = [summary(f"imagenette/resnet18/{name}", 90.0) for name in names]
    text = put(summary("imagenette/bireal18/binary/md-tanh-s-kl", 80.0), *runs)
    section = text.split("## Not in the paper")[1]
    assert re.findall(r"^### (.*)$", section, re.M) == ["Imagenette, Bi-Real-18", "Imagenette, ResNet-18"]
    found = re.findall(r"^\| (.*?) +\|", section, re.M)
    variants = ["MD-tanh-S (KL divergence)", "REF (float)", "MD-tanh-S", "MD-tanh-S (pretrained)"]
    assert [name for name in found if name[0].isupper()] == variants


def test_a_run_for_some_epochs_is_one_of_its_recipe():
    content = summary("imagenet/resnet18/ref", 70.0)
    content["config"] |= {"eval_every": 625}
    assert RunRecord.of(content).changes == {}


def test_a_variant_is_of_the_method_with_the_longest_name():
    names = ("md-tanh-s", "md-tanh-scaled", "md-tanh-s-scaled", "md-tanh-bounded-x", "pq-star-mine", "md-kl", "pqs")
    written = [
        "MD-tanh-S",
        "MD-tanh (scaled)",
        "MD-tanh-S (scaled)",
        "MD-tanh, bounded (x)",
        "PQ* (mine)",
        "md-kl",
        "pqs",
    ]
    assert [labels.method(name) for name in names] == written
    assert labels.method_colour("md-tanh-s-kl") == labels.method_colour("md-tanh-s")


def test_data_sets_outside_the_paper_have_no_paper_column(put):
    text = put(summary("digits/digitsnet/ref", 98.0), summary("digits/digitsnet/binary/md-tanh-s", 97.5))
    section = text.split("## Not in the paper\n\n### UCI digits, DigitsNet")[1]
    assert "paper |" not in section
    assert cells(text, "REF (float)")[0][:3] == ["REF (float)", "float", "98.00"]
    assert cells(text, "MD-tanh-S")[0][:3] == ["MD-tanh-S", "-1, +1 × scale", "97.50"]


def test_runs_with_overrides_that_matter_are_listed_apart(put):
    free = {"seed": 1, "device": "cuda", "out": "x", "data_root": "y", "compile": True}
    text = put(
        summary(MD, 93.0, 1, 93.18, overrides=free),
        summary(MD, 80.0, 1, 93.18, overrides={"iterations": 500, "skip": "a|b", "seed": 1}),
        summary(MD, 85.0, 1, 93.18, overrides={"precision": "float32", "seed": 1}),
        summary(None, 70.0),
    )
    table, others = text.split("## Other runs")
    assert cells(table, "MD-tanh-S")[0][2] == "93.00"
    assert "80.00" not in table
    assert cells(others, MD) == [
        [MD, r"`iterations=500`, `skip=a\|b`", "80.00", "1", "400", "4.5"],
        [MD, "`precision=float32`", "85.00", "1", "400", "4.5"],
    ]
    assert cells(others, "digits, digitsnet, md-tanh-s")[0][1:3] == ["no recipe", "70.00"]


def test_a_run_belongs_to_its_recipe_as_the_recipe_is_today(put):
    before, same = summary(MD, 80.0, paper=93.18), summary(MD, 93.0, paper=93.18, overrides={"lr": 0.001})
    before["config"]["lr"] = 0.5
    assert recipes.get(MD)["lr"] == 0.001
    table, others = put(before, same).split("## Other runs")
    assert cells(table, "MD-tanh-S")[0][2] == "93.00"
    assert cells(others, MD)[0][1:3] == ["`lr=0.5`", "80.00"]


PMF = ("cifar10/resnet18/binary/pmf", "cifar10/resnet18/binary/pmf-star")


def test_the_row_of_pmf_is_not_filled_by_runs_of_pmf_star(put):
    """The two share hyperparameters and Jacobian and differ in the cap on beta, whatever a file calls itself."""
    pmf, star = (summary(name, accuracy, paper=90.0) for name, accuracy in zip(PMF, (92.0, 93.0), strict=True))
    assert (pmf["config"]["beta_cap"], star["config"]["beta_cap"]) == (1e4, 1e35)
    misnamed = {**star, "recipe": PMF[0], "test_accuracy": 94.0}
    table, others = put(pmf, star, misnamed).split("## Other runs")
    assert [row[2] for row in cells(table, "PMF")] == ["92.00"]
    assert [row[2] for row in cells(table, r"PMF\*")] == ["93.00"]
    assert cells(others, PMF[0])[0][1:3] == ["`beta_cap=1e+35`", "94.00"]


def test_the_true_jacobian_stands_outside_the_papers_rows(put):
    true = summary(PMF[1], 92.5, paper=93.24, overrides={"method": "pmf-exact"})
    text = put({**true, "config": {**true["config"], "method": "pmf-exact"}})
    assert "tab:res_binary" not in text
    assert cells(text, PMF[1])[0][1:3] == ["`method=pmf-exact`", "92.50"]


def test_the_runs_with_beta_up_to_1e35_are_results_of_pmf_star():
    folder = ROOT / "results"
    runs = [json.loads(file.read_text()) for file in folder.glob("*-pmf-*.json")]
    capped = {run["config"]["beta_cap"]: run["recipe"].split("/")[-1] for run in runs}
    assert capped[1e35] == "pmf-star"
    assert {run["config"]["method"] for run in runs} == {"pmf-authors"}


def test_other_json_is_ignored_and_subfolders_are_read(tmp_path):
    (tmp_path / "step_cost.json").write_text("[1, 2]")
    (tmp_path / "other.json").write_text('{"device": "cpu"}')
    assert "There are no runs yet" in paper_tables.results_table(tmp_path)
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "run.json").write_text(json.dumps(summary(MD, 93.0, paper=93.18)))
    (tmp_path / "h200" / "config.json").write_text(json.dumps({"recipe": MD}))
    assert cells(paper_tables.results_table(tmp_path), "MD-tanh-S")[0][2] == "93.00"


def test_broken_files_and_seeds_that_come_twice_are_refused_by_name(put, tmp_path):
    with pytest.raises(RecordError, match=r"run1\.json: .* with seed 0 is in .*run0\.json too"):
        put(summary(MD, 93.0), summary(MD, 93.1))
    with pytest.raises(RecordError, match=r"run1\.json: test_accuracy of the summary is None"):
        put(summary(MD, 93.0), {key: value for key, value in summary(MD, 93.0, 1).items() if key != "test_accuracy"})
    with pytest.raises(RecordError, match=r"run1\.json: test_accuracy of the summary is 'many', expected a finite"):
        put(summary(MD, 93.0), {**summary(MD, 93.0, 1), "test_accuracy": "many"})
    with pytest.raises(RecordError, match=r"run1\.json: test_accuracy of the summary is nan"):
        put(summary(MD, 93.0), summary(MD, math.nan, 1))
    (tmp_path / "run1.json").write_text('{"recipe": ')
    with pytest.raises(RecordError, match=r"run1\.json: not readable as JSON"):
        paper_tables.results_table(tmp_path)
    with pytest.raises(RecordError, match="no such folder"):
        paper_tables.results_table(tmp_path / "none")


def test_overrides_are_written_as_they_were_given(put):
    changes = {"affine": True, "channels_last": None, "lr": 0.01, "skip": ["conv1", "*bias"]}
    text = put(summary(MD, 93.0, overrides=changes))
    assert "`affine=true`, `lr=0.01`, `skip=conv1,*bias`" in text


def test_the_same_runs_make_the_same_text(put):
    runs = [summary(MD, 93.0, seed, 93.18) for seed in (2, 0, 1)]
    assert put(*runs) == put(*reversed(runs))


def test_comparison_is_aligned(put):
    rows = [row(summary(f"digits/digitsnet/binary/{name}", 97.5)) for name in ("bc", "md-tanh-s")]
    rows.append({"method": "ref", "levels": "float", "bits": 32.0, "test": 98.0, "seconds": 4.26})
    lines = tables.compare_table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split() == [
        "bc",
        "-1,",
        "+1",
        "×",
        "scale",
        "1.00",
        "97.75",
        "99.00",
        "97.50",
        "4",
        "min",
        "10",
        "s",
    ]
    assert lines[4].split() == ["ref", "float", "32.00", "-", "-", "98.00", "4.3", "s"]
    assert "rounded test %" in tables.compare_table([])


def test_compared_runs_are_called_as_their_recipes_or_by_the_method_that_was_changed():
    """PQ and PQ* are one method with other layers in float, and so not one bar of two seeds."""
    pq, star, pmf, other = (summary(f"cifar10/resnet18/binary/{m}", 90.0) for m in ("pq", "pq-star", "pmf", "bc"))
    star["config"]["method"], pmf["config"]["method"], other["config"]["method"] = "pq", "pmf-authors", "gd-tanh"
    other["overrides"] = {"method": "gd-tanh"}
    rows = [row(run) for run in (pq, star, pmf, other, summary(None, 90.0))]
    assert [row["method"] for row in rows] == ["pq", "pq-star", "pmf", "gd-tanh", "md-tanh-s"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0, "0.0 s"), (59.96, "1 min 00 s"), (253, "4 min 13 s"), (3700, "1 h 01 min")]
)
def test_durations_read_well(seconds, text):
    assert tables.duration(seconds) == text


def test_the_readme_holds_the_tables_of_the_results():
    readme, results = (ROOT / "README.md").read_text(), ROOT / "results"
    remedy = "run python tools/paper_tables.py --write --readme README.md"
    assert paper_tables.with_results(readme, paper_tables.short_tables(results)) == readme, remedy
    assert (results / "README.md").read_text() == paper_tables.results_table(results), remedy


def test_a_readme_without_marks_is_left_alone(put):
    with pytest.raises(RecordError, match="no place for the table"):
        paper_tables.with_results("# Net\n", put(summary(MD, 93.0, paper=93.18)))


def test_tables_are_written_where_they_belong(put, tmp_path, capsys):
    put(summary(MD, 93.0, paper=93.18))
    readme = tmp_path / "other.md"
    readme.write_text(f"# Net\n{paper_tables.BEGIN}\nold\n{paper_tables.END}\n")
    assert paper_tables.main(["--results", str(tmp_path), "--write", "--readme", str(readme)]) == 0
    assert "MD-tanh-S" in (tmp_path / "README.md").read_text()
    assert "binary, paper" in readme.read_text()
    assert "old" not in readme.read_text()
    readme.write_bytes(b"caf\xe9")
    for arguments in (["--results", str(tmp_path), "--readme", str(readme)], ["--results", str(tmp_path / "none")]):
        capsys.readouterr()
        assert paper_tables.main(arguments) == 1
        assert capsys.readouterr().err.count("\n") == 1


def test_the_readme_begins_with_our_own_recipes_once_they_have_runs(put, tmp_path):
    """Beside the paper's float network and its best fully binary one, with the true size of the packed file."""
    put(summary(MD, 93.0, paper=93.18), summary("cifar10/resnet18/ref", 94.6, paper=94.84))
    assert "packed file" not in paper_tables.short_tables(tmp_path)
    layers = [{"name": "conv1.weight", "shape": [64, 3, 3, 3]}, {"name": "fc.bias", "shape": [10]}]
    best = [summary("cifar10/resnet18/binary/best", 95.2 + seed / 10, seed) | {"layers": layers} for seed in (0, 1)]
    put(summary(MD, 93.0, paper=93.18), *best, summary("cifar10/resnet18/ref-best", 96.0))
    text = paper_tables.short_tables(tmp_path)
    run, paper, size = "CIFAR-10, ResNet-18", ["-1, +1", "94.84", "93.28", "96.00"], ["1.00", "1.44 MB"]
    expected = [run, "`best`", *paper, "95.25 ± 0.07 (n = 2)", *size]
    assert cells(text, run) == [expected]
    put(*best, summary("cifar10/resnet18/binary/best-kl", 95.5) | {"layers": layers})
    both = cells(paper_tables.short_tables(tmp_path), run)
    assert both == [expected, [run, "`best-kl`", *paper, "95.50", *size]]


def test_kept_runs_are_printed_by_task_with_their_changes():
    runs = [summary(MD, 93.0, seed) for seed in (0, 1)] + [summary("digits/digitsnet/ref", 98.0)]
    runs.append(summary(MD, 80.0, overrides={"iterations": 500, "method": "md-tanh-s"}))
    text = tables.results_tables([RunRecord.of(run) for run in runs])
    first, second = text.split("UCI digits, DigitsNet\n")
    assert first.startswith("CIFAR-10, ResNet-18\n")
    assert re.search(r"^md-tanh-s +-1, \+1 +1.00 +0, 1 .* 93.00 ± 0.00", first, re.M)
    assert re.search(r"^md-tanh-s iterations=500 +-1, \+1 +1.00 +0 .* 80.00", first, re.M)
    assert re.search(r"^ref +float ", second, re.M)
    assert "There are no runs yet" in tables.results_tables([])


def test_recipes_on_the_same_images_are_not_taken_for_seeds():
    names = [f"{data}/mobilenetv2/binary/bc" for data in ("cifar10", "cifar100")]
    runs = [RunRecord.of(summary(name, 50.0, overrides={"data": "synthetic:3x32x32:10"})) for name in names]
    for run in runs:
        run.config["data"] = "synthetic:3x32x32:10"
    text = tables.results_tables(runs)
    assert [f"(of {name})" in text for name in names] == [True, True]
    assert "±" not in text


def test_a_seed_in_two_files_is_an_error():
    runs = [RunRecord.of(summary(MD, 93.0), Path(name)) for name in ("a.json", "b.json")]
    with pytest.raises(RecordError, match=r"^b\.json: md-tanh-s with seed 0 is in a\.json too; keep one"):
        tables.results_tables(runs)


def test_the_papers_figure_stands_beside_runs_of_the_recipe_as_it_is():
    runs = [summary(MD, 93.0, paper=93.18), summary(MD, 94.0, paper=93.18, overrides={"cutout": 16})]
    runs[1]["config"]["cutout"] = 16
    text = tables.results_tables([RunRecord.of(run) for run in runs])
    assert re.search(r"rounded test % +paper % +time$", text, re.M)
    assert re.search(r"^md-tanh-s +-1, \+1 .* 93\.00 +93\.18 ", text, re.M)
    assert re.search(r"^md-tanh-s cutout=16 .* 94\.00 +- ", text, re.M)


def test_images_that_were_trained_on_validate_nothing():
    content = summary(MD, 93.0) | {"curve": [[100, 99.9]]}
    content["config"] |= {"train_on": "all", "keep": "last"}
    record = RunRecord.of(content)
    assert tables.compare_row(record)["val"] is None
    (line,) = plots._lines([record])
    assert not line.span("val", "accuracy")
    assert not line.best()


def test_a_result_is_kept_without_the_place_of_the_data(tmp_path):
    content = summary(MD, 93.0, overrides={"lr": 0.5, "data_root": "/home/me"})
    content["config"] |= {"data_root": "/home/me", "lr": 0.5}
    file = RunRecord.of(content).write_result(tmp_path)
    assert file.name == "cifar10-resnet18-binary-md-tanh-s-seed0-lr-0.5.json"
    assert "/home/me" not in file.read_text()
    assert RunRecord.read(file).changes == {"lr": 0.5}


def test_a_result_with_the_names_of_version_0_1_stays_the_same_run(tmp_path):
    content = summary(MD, 93.0, overrides={"method": "md-tanh-primal"})  # md-tanh then had another meaning
    content["config"] = {**content["config"], "method": "md-tanh-primal"}
    content["config"].pop("version", None)
    file = RunRecord.of(content).write_result(tmp_path)
    assert RunRecord.read(file).changes == {"method": "md-tanh"}
    assert RunRecord.read(file).write_result(tmp_path) == file
    assert RunRecord.read(file).changes == {"method": "md-tanh"}


def test_a_result_from_before_its_recipe_was_changed_is_kept_under_another_name(tmp_path):
    before = summary(MD, 92.0)
    before["config"]["weight_decay"] = 0.25
    plain = tmp_path / "cifar10-resnet18-binary-md-tanh-s-seed0.json"
    plain.write_text(json.dumps(before))
    for accuracy in (93.0, 93.1):
        assert RunRecord.of(summary(MD, accuracy)).write_result(tmp_path) == plain
        kept = RunRecord.read(tmp_path / f"{plain.stem}-weight_decay-0.25.json")
        assert [run.number("test_accuracy") for run in (RunRecord.read(plain), kept)] == [accuracy, 92.0]
    plain.write_text("{}")
    assert RunRecord.of(summary(MD, 93.0)).write_result(tmp_path) == plain
    assert len(list(tmp_path.iterdir())) == 2
