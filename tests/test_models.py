import copy
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mirrorquant import models
from mirrorquant.models import registry

SHAPES = {"digitsnet": (1, 8, 8), "mobilenetv2": (3, 8, 8), "resnet18": (3, 8, 8), "vgg16": (3, 32, 32)}
SHAPES |= {"resnet34": (3, 8, 8), "bireal18": (3, 32, 32)}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Batches this small spend their time waiting for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def empty(name: str, classes: int = 10, **options: object) -> nn.Module:
    """A model without storage: enough to count and to name its parameters."""
    with torch.device("meta"):
        return models.build(name, classes, **options)


@pytest.mark.parametrize(
    ("name", "count", "tensors", "affine_count"),
    [
        ("vgg16", 15_245_130, 32, 15_245_130 + 2 * (4224 + 1024)),
        ("resnet18", 11_164_362, 22, 11_173_962),
        ("resnet34", 21_265_098, 38, 21_282_122),
        ("bireal18", 11_172_042, 22, 11_181_642),
        ("mobilenetv2", 2_261_834, 59, 2_296_922),
        ("digitsnet", 56_234, 5, 56_234 + 2 * 160),
    ],
)
def test_parameter_counts(name: str, count: int, tensors: int, affine_count: int) -> None:
    sizes = [parameter.numel() for parameter in empty(name, affine=False).parameters()]
    assert (sum(sizes), len(sizes)) == (count, tensors)
    assert sum(parameter.numel() for parameter in empty(name, affine=True).parameters()) == affine_count


def norm(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def usual_resnet18(x: Tensor, w: Iterator[Tensor]) -> Tensor:
    x = F.relu(norm(F.conv2d(x, next(w), padding=1)))
    for stride in (1, 1, 2, 1, 2, 1, 2, 1):
        inner = F.relu(norm(F.conv2d(x, next(w), stride=stride, padding=1)))
        inner = norm(F.conv2d(inner, next(w), padding=1))
        x = F.relu(inner + (x if stride == 1 else norm(F.conv2d(x, next(w), stride=stride))))
    return F.linear(x.mean((2, 3)), next(w), next(w))


def usual_mobilenetv2(x: Tensor, w: Iterator[Tensor]) -> Tensor:
    x = F.relu(norm(F.conv2d(x, next(w), padding=1)))
    for stride in (1, 1, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1):
        inner = F.relu(norm(F.conv2d(x, next(w))))
        inner = F.relu(norm(F.conv2d(inner, next(w), stride=stride, padding=1, groups=inner.shape[1])))
        inner = norm(F.conv2d(inner, next(w)))
        if stride == 1:
            inner = inner + (x if x.shape == inner.shape else norm(F.conv2d(x, next(w))))
        x = inner
    return F.linear(F.relu(norm(F.conv2d(x, next(w)))).mean((2, 3)), next(w), next(w))


def usual_vgg16(x: Tensor, w: Iterator[Tensor]) -> Tensor:
    for layers in (2, 2, 3, 3, 3):
        for _ in range(layers):
            x = F.relu(norm(F.conv2d(x, next(w), next(w), padding=1)))
        x = F.max_pool2d(x, 2)
    x = x.flatten(1)
    for _ in range(2):
        x = F.relu(norm(F.linear(x, next(w), next(w))))
    return F.linear(x, next(w), next(w))


@pytest.mark.parametrize("usual", [usual_resnet18, usual_mobilenetv2, usual_vgg16])
def test_networks_compute_what_the_usual_ones_for_cifar_do(usual: Callable[[Tensor, Iterator[Tensor]], Tensor]) -> None:
    model = models.build(usual.__name__.removeprefix("usual_"), 10)
    models.initialize(model, torch.Generator().manual_seed(0))
    images, weights = torch.rand(4, 3, 32, 32), model.parameters()
    with torch.no_grad():
        torch.testing.assert_close(model(images), usual(images, weights), atol=1e-4, rtol=1e-4)
    assert next(weights, None) is None


@pytest.mark.parametrize("name", models.names())
def test_batch_norm_learns_only_when_affine(name: str) -> None:
    def norm_parameters(model: nn.Module) -> int:
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        assert norms
        return sum(len(list(norm.parameters())) for norm in norms)

    assert norm_parameters(empty(name, affine=False)) == 0
    assert norm_parameters(empty(name, affine=True)) > 0


@pytest.mark.parametrize("name", models.names())
def test_forward_and_backward_reach_every_parameter(name: str) -> None:
    model = models.build(name, 7, affine=True)
    logits = model(torch.randn(2, *SHAPES[name]))
    assert logits.shape == (2, 7)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", models.names())
def test_channels_last_changes_nothing(name: str) -> None:
    model = models.build(name, 10).eval()
    images = torch.rand(2, *SHAPES[name])
    with torch.no_grad():
        expected = model(images)
        model = model.to(memory_format=torch.channels_last)
        logits = model(images.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", models.names())
def test_autocast_reaches_the_logits(name: str) -> None:
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        logits = models.build(name, 10)(torch.rand(2, *SHAPES[name]))
    assert logits.dtype is torch.bfloat16


@pytest.mark.parametrize("name", models.names())
def test_one_graph_for_the_compiler_and_input_left_alone(name: str) -> None:
    model = models.build(name, 10).eval()
    images = torch.randn(2, *SHAPES[name])
    before = images.clone()
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(images), model(images))
    assert torch.equal(images, before)


@pytest.mark.parametrize(("size", "channels"), [(8, 1), (28, 1), (32, 3)])
def test_digitsnet_takes_any_size(size: int, channels: int) -> None:
    assert models.digitsnet(channels=channels)(torch.randn(2, channels, size, size)).shape == (2, 10)


def test_tiny_imagenet_stem_gives_cifar_resolution_to_the_stages() -> None:
    tiny, cifar = models.resnet18(200, stem_stride=2), models.resnet18()
    assert tiny.conv1(torch.zeros(1, 3, 64, 64)).shape == cifar.conv1(torch.zeros(1, 3, 32, 32)).shape
    assert sum(p.numel() for p in tiny.parameters()) == 11_164_362 + 190 * 513


def test_mobilenet_keeps_4x4_pixels_of_a_32x32_image() -> None:
    model = models.mobilenetv2()
    assert model.stages(model.conv1(torch.zeros(1, 3, 32, 32))).shape == (1, 320, 4, 4)


def test_shortcuts_exist_where_the_shape_changes() -> None:
    shortcuts = {name.rsplit(".shortcut")[0] for name, _ in empty("resnet18").named_parameters() if "shortcut" in name}
    assert shortcuts == {"layer2.0", "layer3.0", "layer4.0"}


def test_build_names_the_nearest_model() -> None:
    with pytest.raises(models.ModelError, match=r"There is no model 'vgg61'\. Did you mean 'vgg16'"):
        models.build("vgg61", 10)


def test_build_names_an_option_that_a_model_does_not_take() -> None:
    with pytest.raises(models.ModelError, match=r"'vgg16' .* 'stem_stride'; it takes \['classes', 'affine'\]"):
        models.build("vgg16", 10, stem_stride=2)


def test_one_function_adds_a_model_with_its_options(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: registry._MODELS.pop("linear"))

    @models.register("linear", label="Linear")
    def linear(classes: int = 10, *, width: int = 64) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(width, classes))

    assert "linear" in models.names()
    assert models.options("linear") == ["width"]
    assert models.label("linear") == "Linear"
    model = models.build("linear", 3, width=4)
    assert models.identify(copy.deepcopy(model)) == {"name": "linear", "options": {"classes": 3, "width": 4}}
    assert models.linear(3, width=4)[1].in_features == 4
    model.append(nn.ReLU())
    assert models.identify(model) is None
    with pytest.raises(models.ModelError, match="There is already a model 'linear'"):
        models.register("linear")(linear)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("my_networks")
    vars(module).update(
        with_classes=lambda classes, width=4: nn.Linear(width, classes),
        without_classes=lambda: nn.Linear(4, 3),
        not_a_model=lambda: 5,
        lazy=lambda classes: nn.LazyLinear(classes),
        with_more=lambda classes, depth: nn.Linear(depth, classes),
        a_model=nn.Linear(4, 3),
    )
    monkeypatch.setitem(sys.modules, "my_networks", module)
    return "my_networks"


def test_build_calls_a_function_of_the_user(mine: str) -> None:
    model = models.build(f"{mine}:with_classes", 10, width=6)
    assert isinstance(model, nn.Linear)
    assert (model.in_features, model.out_features) == (6, 10)
    assert models.build(f"{mine}:without_classes", 10).out_features == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_networks:with_clases", "'with_clases' is not a function in 'my_networks'. Did you mean 'with_classes'"),
        ("my_networks:not_a_model", "returned int, expected an nn.Module"),
        ("my_networks:lazy", "lazy layers: call it with a batch before returning it"),
        ("no_such_package.networks:net", "no module 'no_such_package'"),
        ("my_networks:with_more", r"cannot be built with \['classes'\]: missing a required argument: 'depth'"),
        ("my_networks:a_model", "'a_model' is not a function in 'my_networks'"),
        (":net", "not MODULE:NAME"),
        (".networks:net", "not MODULE:NAME"),
    ],
)
def test_build_says_what_is_wrong_with_a_function_of_the_user(mine: str, name: str, message: str) -> None:
    with pytest.raises(models.ModelError, match=message):
        models.build(name, 10)


def test_an_import_that_fails_inside_the_users_module_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_something.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        models.build("needs_something:net", 10)


def test_initialize_is_the_same_for_the_same_seed_in_any_memory_format_and_dtype() -> None:
    first, second, third = models.digitsnet(), models.digitsnet(), models.digitsnet().double()
    second.to(memory_format=torch.channels_last)
    for model in (first, second, third):
        models.initialize(model, torch.Generator().manual_seed(3))
    for a, b, c in zip(first.parameters(), second.parameters(), third.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a.double(), c)
    models.initialize(second, torch.Generator().manual_seed(4))
    assert not torch.equal(first.fc.weight, second.fc.weight)


def test_initialize_draws_the_distributions_of_the_authors() -> None:
    model = nn.ModuleDict({"fc": nn.Linear(300, 2000), "conv": nn.Conv2d(20, 40, 3)})
    models.initialize(model, torch.Generator().manual_seed(0))
    for weight, fans in ((model["fc"].weight, 300 + 2000), (model["conv"].weight, (20 + 40) * 9)):
        bound = (6 / fans) ** 0.5
        assert 0.98 * bound < weight.abs().max().item() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert model["fc"].bias.std().item() == pytest.approx(0.1, rel=0.05)
    assert model["fc"].bias.mean().item() == pytest.approx(0.0, abs=0.01)


def test_initialize_leaves_batch_norm_at_one_and_zero() -> None:
    model = models.digitsnet(affine=True)
    with torch.no_grad():
        model.bn1.weight.fill_(3.0)
        model.bn1.bias.fill_(3.0)
    models.initialize(model)
    assert torch.equal(model.bn1.weight, torch.ones(32))
    assert torch.equal(model.bn1.bias, torch.zeros(32))


@pytest.mark.parametrize(
    "norm", [nn.InstanceNorm2d(4, affine=True), nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.RMSNorm(4)], ids=type
)
def test_initialize_leaves_every_kind_of_normalization_at_one_and_zero(norm: nn.Module) -> None:
    models.initialize(norm)
    expected = {"weight": [1.0] * 4, "bias": [0.0] * 4}
    assert all(parameter.tolist() == expected[name] for name, parameter in norm.named_parameters())


@pytest.mark.parametrize("name", models.names())
def test_models_survive_pickling_with_their_name(name: str) -> None:
    model = pickle.loads(pickle.dumps(models.build(name, 3)))
    assert models.identify(model) == models.identify(models.build(name, 3))
