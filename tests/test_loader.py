"""Batches: a function of their number alone, augmented as a plain per-image loop would do it."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mirrorquant.data import Data, DataError, Images, Loader, clean_batches
from mirrorquant.data.augment import AUGMENTATIONS, Crop, ResizedCrop

MEAN, STD = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)


def pictures(count=50, height=12, width=10, channels=3):
    generator = torch.Generator().manual_seed(7)
    images = torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)
    return Images(images, torch.arange(count), tuple(map(str, range(count))))  # the label says which image it is


def dataset(images=None, mean=MEAN, std=STD):
    images = images or pictures()
    return Data("pictures", images, images, images, mean, std, augment="crop-flip")


def loader(images=None, *, batch_size=8, augment="", seed=3, device="cpu"):
    return Loader(dataset(images).to(device), batch_size=batch_size, augment=augment, seed=seed)


def same(a, b):
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def normalised(images):
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (MEAN, STD))
    return (images / 255 - mean) / std


@pytest.mark.parametrize("augment", AUGMENTATIONS)
def test_batch_depends_on_its_number_alone(augment):
    forward, backward = loader(augment=augment), loader(augment=augment)
    batches = [forward.batch(k) for k in range(20)]
    for k in reversed(range(20)):
        assert same(backward.batch(k), batches[k])
    assert same(loader(augment=augment).batch(13), batches[13])


def test_batches_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    first = loader().batch(9)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    assert same(loader().batch(9), first)


def test_another_seed_or_epoch_gives_other_batches():
    assert not torch.equal(loader(seed=1).batch(0)[1], loader(seed=2).batch(0)[1])
    one = loader()
    firsts = {tuple(one.batch(epoch * one.batches_per_epoch)[1].tolist()) for epoch in range(20)}
    assert len(firsts) == 20


def test_each_epoch_visits_each_image_once():
    whole = loader(batch_size=5)
    for epoch in range(3):
        labels = torch.cat([whole.batch(epoch * 10 + k)[1] for k in range(10)])
        assert labels.sort().values.tolist() == list(range(50))
    partial = loader(batch_size=8)
    assert partial.batches_per_epoch == 6
    labels = torch.cat([partial.batch(k)[1] for k in range(6)])
    assert len(labels.unique()) == 48


def test_batches_are_float32_and_normalised():
    images = pictures()
    x, y = loader(images, augment="none").batch(0)
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    torch.testing.assert_close(x, normalised(images.images[y]))


@pytest.mark.parametrize("padding", [0, 1, 4])
def test_crop_and_flip_agree_with_a_loop_over_images(padding):
    images = pictures().images
    crop = Crop(padding=padding, flip=True)
    draws = crop.draw(50, 12, 10, torch.Generator().manual_seed(0))
    assert draws[:, :2].min() == 0
    assert draws[:, :2].max() == 2 * padding
    assert set(draws[:, 2].tolist()) == {0, 1}
    found = crop.apply(images, draws)
    for image, (top, left, flipped), got in zip(images, draws.tolist(), found, strict=True):
        window = F.pad(image, (padding,) * 4)[:, top : top + 12, left : left + 10]
        assert torch.equal(got, window.flip(2) if flipped else window)


def test_names_of_crops_say_what_they_do():
    draws = {name: a.draw(500, 8, 8, torch.Generator().manual_seed(0)) for name, a in AUGMENTATIONS.items()}
    assert {name: (int(d[:, 0].max()), int(d[:, -1].max())) for name, d in draws.items() if d.shape[1] == 3} == {
        "none": (0, 0),
        "shift": (2, 0),
        "crop": (8, 0),
        "crop-flip": (8, 1),
    }


def test_resized_crop_agrees_with_interpolation_of_each_box():
    images = pictures(60, 16, 24).images
    crop = ResizedCrop()
    draws = crop.draw(60, 16, 24, torch.Generator().manual_seed(0))
    found = crop.apply(images, draws)
    for image, (top, left, height, width, flipped), got in zip(images, draws.tolist(), found, strict=True):
        box = image[:, top : top + height, left : left + width].double()
        expected = F.interpolate(box[None], (16, 24), mode="bilinear", align_corners=False)[0]
        expected = expected.flip(2) if flipped else expected
        assert (got.double() - expected).abs().max() <= 0.5 + 1e-9  # rounded to whole grey levels


@settings(max_examples=30)
@given(height=st.integers(1, 80), width=st.integers(1, 80), seed=st.integers(0, 2**32 - 1))
def test_boxes_of_resized_crops_lie_inside_the_image(height, width, seed):
    crop = ResizedCrop()
    top, left, h, w, flipped = crop.draw(20, height, width, torch.Generator().manual_seed(seed)).unbind(1)
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (h >= 1).all()
    assert (w >= 1).all()
    assert (top + h <= height).all()
    assert (left + w <= width).all()
    images = torch.full((20, 1, height, width), 200, dtype=torch.uint8)
    drawn = torch.stack([top, left, h, w, flipped], 1)
    assert (crop.apply(images, drawn) == 200).all()


def test_the_largest_images_are_resized_exactly_and_larger_ones_refused():
    white = torch.full((1, 1, 1024, 2048), 255, dtype=torch.uint8)
    draws = ResizedCrop().draw(1, 1024, 2048, torch.Generator().manual_seed(0))
    assert (ResizedCrop().apply(white, draws) == 255).all()
    with pytest.raises(ValueError, match="images have 1024×2049 pixels, expected 2,097,152 at most"):
        ResizedCrop().draw(1, 1024, 2049, torch.Generator())


def usual_box(height, width, chance):
    for _ in range(10):
        area = height * width * chance.uniform(0.08, 1.0)
        ratio = math.exp(chance.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return h, w
    return height, width


def test_boxes_of_resized_crops_have_the_usual_areas_and_ratios():
    _, _, h, w, _ = ResizedCrop().draw(20_000, 64, 64, torch.Generator().manual_seed(0)).double().unbind(1)
    area, ratio = h * w / 64**2, w / h
    assert area.min() > 0.07
    assert area.max() == 1
    usual = torch.tensor([usual_box(64, 64, random.Random(seed)) for seed in range(5_000)], dtype=torch.float64)
    assert abs(area.mean() - (usual.prod(1) / 64**2).mean()) < 0.015
    assert abs(area.std() - (usual.prod(1) / 64**2).std()) < 0.015
    assert ratio.min() > 0.70
    assert ratio.max() < 1.43
    assert abs(ratio.log().mean()) < 0.01


@pytest.mark.parametrize(("height", "width", "box"), [(40, 8, [14, 0, 11, 8]), (8, 40, [0, 14, 8, 11])])
def test_where_no_box_fits_it_is_the_largest_central_one_of_an_allowed_ratio(height, width, box):
    draws = ResizedCrop(scale=(1.0, 1.0)).draw(5, height, width, torch.Generator().manual_seed(0))
    assert draws[:, :4].tolist() == [box] * 5


@pytest.mark.parametrize("augment", ["crop-flip", "resized-crop-flip"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_very_same_batches(augment):
    there, here = loader(augment=augment, device="cuda"), loader(augment=augment)
    for k in range(15):
        x, y = there.batch(k)
        assert x.device.type == y.device.type == "cuda"
        assert same((x.cpu(), y.cpu()), here.batch(k))


def test_clean_batches_give_every_image_once_in_order():
    images = pictures()
    batches = list(clean_batches(images, dataset(images), 8))
    assert [len(y) for _, y in batches] == [8] * 6 + [2]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert torch.equal(y, images.labels)
    torch.testing.assert_close(x, normalised(images.images))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, expected 1 to 50"),
        ({"batch_size": 51}, "batch_size is 51, expected 1 to 50"),
        ({"augment": "mixup"}, "augment is 'mixup', expected one of none, shift"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        loader(**change)


def test_statistics_that_do_not_fit_the_channels_are_refused():
    for mean, std in (((0.5,), (0.5,)), (MEAN, (0.5, 0.5, 0.0))):
        with pytest.raises(DataError, match="expected 3 each, one per channel, std above 0"):
            dataset(mean=mean, std=std)
