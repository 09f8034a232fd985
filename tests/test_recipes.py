"""The recipes against the paper's tables, transcribed here a second time, in the layout of the paper."""

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn

from mirrorquant import models
from mirrorquant.train import Config, ConfigError, build, evaluate, recipes
from mirrorquant.train.config import KEYS

COLUMNS = ("cifar10/vgg16", "cifar10/resnet18", "cifar100/vgg16", "cifar100/resnet18", "tinyimagenet/resnet18")
COLUMNS_DATA = ("cifar10", "cifar100", "tinyimagenet")
CLASSES = {"cifar10": 10, "cifar100": 100, "tinyimagenet": 200, "digits": 10, "fashion-mnist": 10}
CLASSES |= {"imagenet": 1000, "imagenette": 10}
IMAGES = {"imagenet": 1_281_167, "imagenette": 9_469}  # to train on

RES_BINARY = """
    ref           93.33  94.84  71.50  76.31  58.35
    bc            89.04  91.64  59.13  72.14  49.65
    pq            85.41  90.76  39.61  65.13  44.32
    pq-star       90.11  92.32  55.10  68.35  49.97
    pmf           90.51  92.73  61.52  71.85  51.00
    pmf-star      91.40  93.24  64.71  71.56  51.52
    gd-tanh       91.47  93.27  60.67  71.46  51.43
    md-softmax    90.47  91.28  56.25  68.49  46.52
    md-tanh       91.64  92.97  61.31  72.13  54.62
    md-softmax-s  91.30  93.28  63.97  72.18  51.81
    md-tanh-s     91.53  93.18  61.69  72.18  52.32
"""
RES_TERNARY = """
    pq            83.32  90.50  32.16  59.18  41.46
    pq-star       92.20  93.85  57.64  70.98  45.72
    gd-tanh       91.21  93.20  53.88  69.48  50.65
    md-softmax-s  91.69  93.30  65.11  72.01  52.21
    md-tanh-s     91.70  93.42  66.15  71.29  52.69
"""
RES_MOBILENET = """
    ref           93.67  73.97
    bc            86.84  65.04
    md-softmax-s  89.71  66.40
    md-tanh-s     89.99  66.63
"""

# Rows: learning_rate, lr_scale, beta_scale, beta_scale_interval, and weight_decay where the paper's table has it.
HYPER1_METHODS = "md-softmax md-tanh md-softmax-s md-tanh-s pmf-star gd-tanh bc pq"
HYPER1 = {
    "cifar10/resnet18": """
        0.001   0.001   0.001   0.001   0.001   0.001   0.001   0.01
        0.2     0.3     0.3     0.3     0.3     0.3     0.3     0.5
        1.02    1.01    1.02    1.02    1.1     1.1     -       0.0001
        200     100     200     200     1000    1000    -       -
    """,
    "cifar100/resnet18": """
        0.001   0.001   0.001   0.001   0.001   0.001   0.001   0.1
        0.2     0.3     0.2     0.2     0.3     0.5     0.2     -
        1.05    1.05    1.1     1.2     1.01    1.01    -       0.001
        500     500     200     500     100     100     -       -
    """,
    "cifar10/vgg16": """
        0.01    0.001   0.001   0.001   0.001   0.001   0.0001  0.01
        0.2     0.3     0.3     0.2     0.5     0.3     0.3     0.5
        1.05    1.1     1.2     1.2     1.05    1.1     -       0.0001
        500     1000    2000    2000    500     1000    -       -
    """,
    "cifar100/vgg16": """
        0.001   0.001   0.0001  0.001   0.0001  0.001   0.0001  0.01
        0.3     0.3     0.2     0.5     0.5     0.5     0.2     0.5
        1.01    1.05    1.2     1.05    1.02    1.1     -       0.0001
        100     500     500     500     200     1000    -       -
    """,
    "tinyimagenet/resnet18": """
        0.001   0.001   0.001   0.001   0.001   0.001   0.001   0.01
        0.2     0.5     0.1     0.1     0.5     0.5     0.5     -
        1.02    1.2     1.02    1.2     1.01    1.01    -       0.0001
        200     2000    100     500     100     100     -       -
    """,
}
HYPER2_METHODS = "ref md-softmax-s md-tanh-s gd-tanh pq pq-star"
HYPER2 = {
    "cifar10/resnet18": """
        0.1     0.001   0.01    0.01    0.01    0.01
        0.3     0.3     0.2     0.5     0.3     -
        -       1.05    1.2     1.02    0.0001  0.0001
        -       500     1000    500     -       -
        0.0001  0       0       0       0       0.0001
    """,
    "cifar100/resnet18": """
        0.1     0.001   0.001   0.01    0.01    0.001
        0.1     0.1     0.5     0.5     0.2     -
        -       1.1     1.1     1.02    0.0001  0.0001
        -       100     500     1000    -       -
        0.0001  0       0       0       0       0.0001
    """,
    "cifar10/vgg16": """
        0.1     0.001   0.01    0.01    0.01    0.1
        0.2     0.3     0.3     0.3     -       -
        -       1.05    1.1     1.01    1e-07   0.0001
        -       500     1000    500     -       -
        0.0001  0       0       0       0       0.0001
    """,
    "cifar100/vgg16": """
        0.1     0.0001  0.001   0.01    0.01    0.0001
        0.2     0.3     0.5     0.2     -       -
        -       1.05    1.1     1.05    0.0001  0.0001
        -       100     500     2000    -       -
        0.0001  0       0       0       0       0.0001
    """,
    "tinyimagenet/resnet18": """
        0.1     0.001   0.01    0.01    0.01    0.01
        0.1     0.1     0.1     0.5     -       -
        -       1.2     1.2     1.05    0.01    0.0001
        -       500     2000    2000    -       -
        0.0001  0       0       0       0       0.0001
    """,
}
HYPER3_METHODS = "ref bc md-softmax-s md-tanh-s"
HYPER3 = {
    "cifar10/mobilenetv2": """
        0.01    0.001   0.01    0.01
        0.5     0.5     0.3     0.2
        -       -       1.1     1.2
        -       -       1000    2000
        0.0001  0       0       0
    """,
    "cifar100/mobilenetv2": """
        0.01    0.001   0.01    0.01
        0.5     0.2     0.1     0.1
        -       -       1.1     1.02
        -       -       500     100
        0.0001  0       0       0
    """,
}

# Top-1 and top-5: the rows of REF and MD-tanh-S, where * is training from scratch and + full binarization.
RES_IMAGENET = """
    resnet18/ref                          70.61  89.40
    resnet18/binary/md-tanh-s-full        56.67  79.66   # MD-tanh-S*+
    resnet18/binary/md-tanh-s             65.92  86.29   # MD-tanh-S*
    resnet18/binary/md-tanh-s-pretrained  66.78  87.01   # MD-tanh-S
"""
RES_IMAGENET_BINARYWTACT = """
    bireal18/binary/md-tanh-s             60.3   82.3
    bireal18/binary/md-tanh-s-kl          62.8   84.3    # KL div. loss
"""
# Pretrained, conv1 and FC, bias, BN, layerwise scaling, accuracy.
RES_IMAGENET_ABL = """
    md-tanh-s-pretrained              yes  float   float   float  no   66.78/87.01
    md-tanh-s                         no   float   float   float  no   65.92/86.29
    md-tanh-s-ends-pretrained         yes  binary  float   float  no   60.39/82.77
    md-tanh-s-ends                    no   binary  float   float  no   59.92/82.42
    md-tanh-s-full-pretrained         yes  binary  binary  float  no   56.60/79.79
    md-tanh-s-full                    no   binary  binary  float  no   56.67/79.66
    md-tanh-s-ends-scaled-pretrained  yes  binary  float   float  yes  61.91/83.87
    md-tanh-s-full-scaled-pretrained  yes  binary  binary  float  yes  56.05/79.69
"""
# REF (float), MD-tanh-S* and MD-tanh-S: base_learning_rate, warmup_epochs, beta_scale, beta_scale_interval, batch_size,
# weight_decay; the last row is the epochs of the text.
HYPER_IMAGENET = """
    2.048       2.048       0.0768
    8           8           0
    -           1.02        1.02
    -           62          275
    2048        2048        256
    3.0517e-05  3.0517e-05  3.0517e-05
    90          90          55
"""


def name_of(column: str, levels: str, method: str) -> str:
    return f"{column}/ref" if method == "ref" else f"{column}/{levels}/{method}"


def accuracies() -> dict[str, float]:
    cells = {}
    mobilenet = ("cifar10/mobilenetv2", "cifar100/mobilenetv2")
    for table, columns, levels in (
        (RES_BINARY, COLUMNS, "binary"),
        (RES_TERNARY, COLUMNS, "ternary"),
        (RES_MOBILENET, mobilenet, "binary"),
    ):
        for line in table.strip().splitlines():
            method, *row = line.split()
            cells.update({name_of(c, levels, method): float(x) for c, x in zip(columns, row, strict=True)})
    return cells


def hyperparameters() -> dict[str, list[str]]:
    """Columns of the hyperparameter tables as printed; PMF and binary PQ* have none and borrow one."""
    columns = {}
    for table, methods, levels in (
        (HYPER1, HYPER1_METHODS, "binary"),
        (HYPER2, HYPER2_METHODS, "ternary"),
        (HYPER3, HYPER3_METHODS, "binary"),
    ):
        for column, text in table.items():
            rows = [line.split() for line in text.strip().splitlines()]
            for method, *values in zip(methods.split(), *rows, strict=True):
                columns[name_of(column, levels, method)] = values
    for column in COLUMNS:
        columns[f"{column}/binary/pmf"] = columns[f"{column}/binary/pmf-star"]
        columns[f"{column}/binary/pq-star"] = columns[f"{column}/binary/pq"]
    return columns


def lines(table: str) -> dict[str, list[str]]:
    """The rows of a table by their first word."""
    rows = [line.partition("#")[0].split() for line in table.strip().splitlines()]
    return {first: rest for first, *rest in rows}


def imagenet_accuracies() -> dict[str, set[tuple[float, float]]]:
    """Top-1 and top-5 by recipe, as printed; a row that stands in two tables must be the same in both."""
    found: dict[str, set[tuple[float, float]]] = {}
    rows = [*lines(RES_IMAGENET).items(), *lines(RES_IMAGENET_BINARYWTACT).items()]
    rows += [(f"resnet18/binary/{name}", row[-1].split("/")) for name, row in lines(RES_IMAGENET_ABL).items()]
    for name, (top1, top5) in rows:
        found.setdefault(f"imagenet/{name}", set()).add((float(top1), float(top5)))
    return found


BEYOND = recipes.cells("beyond")
CIFAR = [name for name in recipes.names() if name.startswith(COLUMNS) or "mobilenetv2" in name]
PAPER = [name for name in CIFAR if name not in BEYOND]
CORRECTED = {"cifar100/resnet18/ref": ("weight_decay", 1e-4, 5e-4)}  # printed, and what runs say; see findings.md
IMAGENET = [name for name in recipes.names() if name.startswith("imagenet/")]
PHOTOS = [name for name in recipes.names() if name.startswith(("imagenet/", "imagenette/"))]
ABLATION = {f"imagenet/resnet18/binary/{name}": row for name, row in lines(RES_IMAGENET_ABL).items()}


def test_every_cell_of_the_tables_is_there_and_nothing_else() -> None:
    assert len(PAPER) == 5 * 11 + 5 * 5 + 2 * 4
    assert set(PAPER) == set(accuracies()) == set(hyperparameters())
    assert set(IMAGENET) == {*imagenet_accuracies(), "imagenet/resnet34/ref"}
    others = sorted(set(recipes.names()) - set(PAPER) - set(IMAGENET))
    binary = ["bc", "gd-tanh", "md-softmax", "md-softmax-s", "md-tanh", "md-tanh-s", "pmf", "pq"]
    digits = [*(f"binary/{method}" for method in binary), "ref", "ternary/md-tanh-s"]
    fashion = ["binary/bc", "binary/md-tanh-s", "ref"]
    expected = [f"digits/digitsnet/{name}" for name in digits] + [f"fashion-mnist/digitsnet/{name}" for name in fashion]
    variants = {"bireal18": ["md-tanh-s", "md-tanh-s-kl"], "resnet18": ["md-tanh-s", "md-tanh-s-pretrained"]}
    expected += [f"imagenette/{model}/binary/{name}" for model, each in variants.items() for name in each]
    expected += ["imagenette/resnet18/ref", "imagenette/resnet34/ref"]
    beyond = [
        f"{data}/resnet18/{name}" for data in COLUMNS_DATA for name in ("binary/best", "binary/best-kl", "ref-best")
    ]
    beyond += [f"cifar10/resnet18/{name}" for name in ("binary/quick", "ternary/best", "ternary/best-kl")]
    assert sorted(BEYOND) == sorted(beyond)
    assert others == sorted([*expected, *beyond])
    assert len(set(recipes.names())) == len(recipes.names())


@pytest.mark.parametrize("name", PAPER)
def test_accuracy_and_hyperparameters_are_the_papers(name: str) -> None:
    recipe = recipes.get(name)
    lr, lr_scale, beta_scale, beta_interval, weight_decay = [*hyperparameters()[name], "0"][:5]
    assert recipe["paper"] == accuracies()[name]
    assert recipe["lr"] == float(lr)
    assert recipe["lr_scale"] == (1.0 if lr_scale == "-" else float(lr_scale))
    key, printed, corrected = CORRECTED.get(name, ("", 0.0, 0.0))
    assert not key or (key == "weight_decay" and printed == float(weight_decay))
    assert recipe["weight_decay"] == (corrected if key else float(weight_decay))
    rate = recipe.get("pq_rate" if recipe["method"].startswith("pq") else "beta_scale")
    assert rate == (None if beta_scale == "-" else float(beta_scale))
    assert recipe.get("beta_interval") == (None if beta_interval == "-" else int(beta_interval))


@pytest.mark.parametrize("name", PAPER)
def test_setup_is_the_papers(name: str) -> None:
    recipe = recipes.get(name)
    sgd = name.endswith("/ref")
    assert (recipe["iterations"], recipe["batch_size"], recipe["lr_interval"]) == (100_000, 128, 30_000)
    assert recipe["optimizer"] == ("sgd" if sgd else "adam")
    assert recipe.get("momentum") == (0.9 if sgd else None)
    assert recipe.get("stem_stride") == (2 if recipe["data"] == "tinyimagenet" else None)


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_says_what_its_name_says(name: str) -> None:
    recipe = recipes.get(name)
    data, model, *levels, method = name.split("/")
    methods = {"pq-star": "pq" if levels == ["binary"] else "pq-levels", "pmf-star": "pmf"}
    if name in PHOTOS and levels:
        methods[method] = "md-tanh-s"
        assert method.startswith("md-tanh-s")
    if name in BEYOND:
        methods[method] = "md-tanh-s" if levels else "ref"
    assert (recipe["data"], recipe["model"], recipe["method"]) == (data, model, methods.get(method, method))
    assert [recipe[key] for key in ("levels",) if key in recipe] == levels
    assert recipe["affine"] == (not levels or data == "fashion-mnist" or name in PHOTOS)


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_is_a_configuration_in_which_every_key_has_an_effect(name: str) -> None:
    config, recipe = Config.from_recipe(name), recipes.get(name)
    assert all(config[key] == value and KEYS[key].help for key, value in recipe.items())
    given = {key: value for key, value in recipe.items() if KEYS[key].section != "origin" and value != []}
    assert replace(config, overrides=given).idle_overrides() == {}


@pytest.mark.parametrize("name", recipes.names())
def test_keys_are_there_only_where_they_mean_something(name: str) -> None:
    recipe = recipes.get(name)
    anneals = recipe["method"] not in ("ref", "bc", "pq", "pq-levels")
    for key in ("beta_scale", "beta_interval", "beta_cap"):
        assert (key in recipe) == anneals
    assert recipe.get("beta_cap", 1e35) == (1e4 if name.endswith("/pmf") else 1e35)
    for key in ("pq_rate", "finalize_at"):
        assert (key in recipe) == recipe["method"].startswith("pq")
    assert recipe.get("finalize_at", 0.6667) == 0.6667


@pytest.mark.parametrize("name", PAPER)
def test_a_note_says_what_does_not_come_from_the_paper(name: str) -> None:
    recipe = recipes.get(name)
    note = recipe.get("note", "")
    assert ("ProxQuant" in note) == recipe["method"].startswith("pq")
    assert ("random resized crop" in note) == (recipe["data"] == "tinyimagenet")
    completed = recipe["method"] in ("pq", "pq-levels", "pmf") or recipe["data"] == "tinyimagenet"
    completed |= "precision" in recipe
    assert bool(note) == (completed or name in CORRECTED)
    if name in CORRECTED:
        assert "weight_decay = 1e-4" in note


@pytest.mark.parametrize("name", [name for name in recipes.names() if name not in PHOTOS])
def test_skip_patterns_match_and_of_the_papers_only_the_original_pq_setup_has_them(name: str) -> None:
    recipe = recipes.get(name)
    ours = name.startswith("fashion-mnist") and not name.endswith("/ref")
    assert bool(recipe["skip"]) == (name.endswith("pq-star") or ours)
    kept = set()
    for pattern in recipe["skip"]:
        matched = {p for p in parameters(recipe) if any(fnmatchcase(path, pattern) for path in paths(p))}
        assert matched, f"{pattern} matches no parameter of {recipe['model']}"
        kept |= matched
    if ours:
        assert kept == {"conv1.weight", "fc.weight", "fc.bias"}
    elif recipe["skip"]:
        assert kept == float_in_the_original_pq(recipe)


def parameters(recipe: dict[str, object]) -> dict[str, int]:
    options = {"stem_stride": recipe["stem_stride"]} if "stem_stride" in recipe else {}
    with torch.device("meta"):
        model = models.build(str(recipe["model"]), CLASSES[str(recipe["data"])], affine=recipe["affine"], **options)
    return {name: parameter.ndim for name, parameter in model.named_parameters()}


def paths(parameter: str) -> list[str]:
    """A parameter's name and the modules above it: a.b.weight, a.b, a."""
    parts = parameter.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def float_in_the_original_pq(recipe: dict[str, object]) -> set[str]:
    """Fully-connected layers and shortcuts; when binary also biases, when ternary also the first convolution."""
    shapes = parameters(recipe)
    linear = {name.rpartition(".")[0] for name, dimensions in shapes.items() if dimensions == 2}
    kept = {name for name in shapes if name.rpartition(".")[0] in linear or "shortcut" in name}
    if recipe["levels"] == "binary":
        return kept | {name for name, dimensions in shapes.items() if dimensions == 1}
    first = next(iter(shapes)).rpartition(".")[0]
    return kept | {name for name in shapes if name.rpartition(".")[0] == first}


# ImageNet, and Imagenette, which has its recipes on a smaller scale.


@pytest.mark.parametrize("name", IMAGENET)
def test_imagenet_accuracies_are_the_papers(name: str) -> None:
    recipe = recipes.get(name)
    assert {(recipe.get("paper"), recipe.get("paper_top5"))} == imagenet_accuracies().get(name, {(None, None)})


@pytest.mark.parametrize("name", IMAGENET)
def test_imagenet_hyperparameters_are_the_papers(name: str) -> None:
    column = 0 if name.endswith("/ref") else 2 if name.endswith("-pretrained") else 1
    texts = [line.split()[column] for line in HYPER_IMAGENET.strip().splitlines()]
    lr, warmup, beta_scale, beta_interval, batch_size, weight_decay, epochs = (
        None if text == "-" else float(text) for text in texts
    )
    recipe = recipes.get(name)
    assert (recipe["lr"], recipe["batch_size"], recipe["weight_decay"]) == (lr, batch_size, weight_decay)
    assert (recipe.get("beta_scale"), recipe.get("beta_interval")) == (beta_scale, beta_interval)
    assert recipe["epochs"] == epochs
    assert recipe["warmup"] == warmup * (IMAGES["imagenet"] // batch_size)
    assert (recipe["optimizer"], recipe["momentum"], recipe["lr_schedule"]) == ("sgd", 0.875, "cosine")
    assert not recipe["decay_norms"], "weight decay in batchnorm layers is off"
    assert recipe["keep"] == "last", "accuracy at the end of the final epoch"


@pytest.mark.parametrize("name", PHOTOS)
def test_iterations_are_those_of_the_epochs(name: str) -> None:
    config = Config.from_recipe(name)
    per_epoch = IMAGES[config.data] // config.batch_size
    assert config.iterations == config.epochs * per_epoch
    assert config.timed(per_epoch) == replace(config, eval_every=config.eval_every or per_epoch)
    assert config.warmup % per_epoch == config.eval_every % per_epoch == 0
    assert Config.from_recipe(name, ["epochs=10"]).timed(per_epoch).warmup == round(config.warmup * 10 / config.epochs)


@pytest.mark.parametrize("name", sorted(ABLATION))
def test_what_the_ablation_varies_is_the_papers(name: str) -> None:
    config = Config.from_recipe(name)
    pretrained, ends, bias, norms, scaled, _ = ABLATION[name]
    assert config.init == ("runs/imagenet-resnet18-ref-seed0" if pretrained == "yes" else "")
    assert config.scale == ("tensor-fixed-he" if scaled == "yes" else "")
    model, quantized, _ = split_by(config)
    expected = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    assert len(expected) == 1 + 16 + 3
    expected |= {"fc.weight", "fc.bias"}
    expected -= {"conv1.weight", "fc.weight"} if ends == "float" else set()
    expected -= {"fc.bias"} if bias == "float" else set()
    assert (quantized, norms) == (expected, "float")


@pytest.mark.parametrize("name", [name for name in PHOTOS if "bireal18" in name])
def test_of_bireal_net_the_convolutions_of_signs_are_binary(name: str) -> None:
    config = Config.from_recipe(name)
    model, quantized, _ = split_by(config)
    assert quantized == {f"layer{stage}.{block}.conv.weight" for stage in (1, 2, 3, 4) for block in range(4)}
    assert sum(isinstance(module, nn.PReLU) for module in model.modules()) == 16
    distilled = (config.teacher, config.temperature, config.hard_share)
    teacher = f"runs/{config.data}-resnet34-ref-seed0"
    assert distilled == ((teacher, 1.0, 0.0) if name.endswith("-kl") else ("", 4.0, 0.1))


@pytest.mark.parametrize("name", PHOTOS)
def test_weights_decay_and_batch_norms_and_slopes_do_not(name: str) -> None:
    config = Config.from_recipe(name)
    model, quantized, decay = split_by(config)
    kinds = (nn.BatchNorm2d, nn.PReLU)
    norms = {f"{p}.{n}" for p, m in model.named_modules() if isinstance(m, kinds) for n, _ in m.named_parameters()}
    assert {parameter for parameter, value in decay.items() if value == 0} == norms
    assert {decay[parameter] for parameter in decay.keys() - norms} == {config.weight_decay}
    assert not quantized & norms
    assert bool(quantized) == (config.method != "ref")


def split_by(config: Config) -> tuple[nn.Module, set[str], dict[str, float]]:
    """The model, the names of its quantized parameters, and the weight decay of each parameter."""
    options = {key: config[key] for key in models.options(config.model) if key in KEYS}
    with torch.device("meta"):
        model = models.build(config.model, CLASSES[config.data], **options)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    opt = build.optimizer(config, model, batches_per_epoch=1)
    decay = {n: group["weight_decay"] for group in opt.param_groups for n in group["param_names"]}
    return model, {row["name"] for row in evaluate.layers(opt) if row["bits"] < 32}, decay


def test_a_recipe_is_the_callers_own() -> None:
    recipes.get("cifar10/resnet18/binary/pq-star")["skip"].clear()
    assert recipes.get("cifar10/resnet18/binary/pq-star")["skip"]


@pytest.mark.parametrize("column", COLUMNS)
def test_ternary_has_no_ref_of_its_own(column: str) -> None:
    with pytest.raises(recipes.RecipeError, match=f"no recipe '{column}/ternary/ref'. Did you mean "):
        recipes.get(f"{column}/ternary/ref")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(recipes.RecipeError, match="Did you mean 'cifar10/resnet18/binary/md-tanh-s'"):
        recipes.get("cifar10/resnet18/binary/md-tanhs")


GOOD = """
[defaults]
lr = 0.1
[methods]
ref = {}
[methods.binary]
bc = {}
[net]
ref = {}
[net.binary]
bc = { lr = 0.2 }
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{ lr = 0.2 }", "{ lrr = 0.2 }", "'lrr'"),
        ("{ lr = 0.2 }", "{ lr = true }", "lr is True, but it must be float"),
        ("[net.binary]", "[net.binry]", "'binry'"),
        ("[methods.binary]", "[methods.binry]", "'binary/bc'"),
    ],
)
def test_a_mistake_in_a_file_is_an_error(old: str, new: str, message: str) -> None:
    assert {name: recipe["lr"] for name, recipe in recipes._parse("toy", GOOD).items()} == {
        "toy/net/ref": 0.1,
        "toy/net/binary/bc": 0.2,
    }
    with pytest.raises((ConfigError, TypeError, KeyError), match=message):
        [Config(**recipe) for recipe in recipes._parse("toy", GOOD.replace(old, new)).values()]


def test_a_row_starts_from_the_one_that_it_is_like() -> None:
    text = GOOD.replace("bc = {}", 'bc = { skip = ["fc"], warmup = 3 }\nbc-mine = { like = "bc", warmup = 5 }')
    text += "bc-mine = {}"
    base, mine = (recipes._parse("toy", text)[f"toy/net/binary/{name}"] for name in ("bc", "bc-mine"))
    assert mine == {**base, "lr": 0.1, "warmup": 5}
    assert mine["method"] == "bc"
    with pytest.raises(KeyError, match="binary/cb"):
        recipes._parse("toy", text.replace('like = "bc"', 'like = "cb"'))
