"""Batches: a function of their number alone, augmented as a plain per-image loop would do it."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mirrorquant.data import Data, DataError, Extra, Images, Loader, clean_batches
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


# Cutout, mixup, cutmix and alternating flips.


def extra(images=None, *, batch_size=8, augment="crop-flip", seed=3, part=(0, 1), **options):
    return Loader(dataset(images), batch_size=batch_size, augment=augment, seed=seed, part=part, extra=Extra(**options))


EXTRAS = [
    {"cutout": 4},
    {"mixup": 0.5},
    {"cutmix": 1.0},
    {"mixup": 0.2, "cutmix": 1.0, "cutout": 3, "alternating_flip": True},
]


@pytest.mark.parametrize("options", EXTRAS)
def test_extra_batches_depend_on_their_number_alone_and_are_shared_by_processes(options):
    batches = [extra(**options).batch(k) for k in range(14)]
    backward = extra(**options)
    for k in reversed(range(14)):
        assert same(backward.batch(k), batches[k])
        shares = [extra(part=(rank, 2), **options).batch(k) for rank in range(2)]
        assert same([torch.cat(each) for each in zip(*shares, strict=True)], batches[k])


@pytest.mark.parametrize("options", EXTRAS)
def test_extras_do_not_change_the_order_nor_the_crops(options):
    plain, changed = loader(augment="crop-flip").plan(5), extra(**options).plan(5)
    assert torch.equal(plain[0], changed[0])
    corners = slice(0, 2) if options.get("alternating_flip") else slice(0, 3)
    assert torch.equal(plain[1][:, corners], changed[1][:, corners])


def test_cutout_erases_one_clipped_square_of_each_image():
    side, whole = 5, 0
    for k in range(12):
        x, y = extra(augment="none", cutout=side).batch(k)
        assert y.dtype == torch.int64
        expected = normalised(pictures().images[y])
        erased = (x == 0).all(1)
        torch.testing.assert_close(x, torch.where(erased[:, None], 0.0, expected))
        for mask in erased:
            rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
            box = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
            assert box.all()  # a rectangle
            assert (side + 1) // 2 - 1 <= min(box.shape)
            assert max(box.shape) <= side
            whole += box.numel() == side**2
    assert whole > 12


def test_the_centre_of_cutout_is_uniform_over_the_image():
    boxes = Extra(cutout=1).erased(60_000, 4, 3, torch.Generator().manual_seed(0))
    assert torch.equal(boxes[:, 1] - boxes[:, 0], torch.ones(60_000, dtype=torch.int64))
    counts = torch.bincount(boxes[:, 0] * 3 + boxes[:, 2])
    assert counts.shape == (12,)
    assert (counts - 5000).abs().max() < 350  # five standard deviations


@pytest.mark.parametrize("options", [{"mixup": 0.7}, {"cutmix": 0.7}, {"mixup": 0.7, "cutmix": 0.7}])
def test_mixed_images_agree_with_a_loop_over_images(options):
    made, images = extra(augment="none", **options), pictures().images
    order, draws = made.plan(0)
    columns = draws[:, 3:8].tolist()
    for k in range(made.batches_per_epoch):
        x, y = made.batch(k)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.sum(1), torch.ones(8))
        for row in range(8):
            place = 8 * k + row
            own, other = int(order[place]), int(order[(place + 8) % 50])
            pixels, top, bottom, left, right = columns[place]
            assert own != other
            expected = (images[own].double() * pixels + images[other].double() * (256 - pixels)) / 256
            expected = (expected + 0.5).floor()  # to whole grey levels
            expected[:, top:bottom, left:right] = images[other][:, top:bottom, left:right]
            torch.testing.assert_close(x[row], normalised(expected[None])[0].float(), rtol=1e-5, atol=1e-6)
            area = (bottom - top) * (right - left) / 120
            share = pixels / 256 * (1 - area)
            torch.testing.assert_close(y[row, own].item(), share, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(y[row, other].item(), 1 - share, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_shares_have_the_moments_of_a_beta_distribution(alpha):
    count, variance = 40_000, 1 / (4 * (2 * alpha + 1))
    share = Extra(mixup=alpha).draw(count, 8, 8, torch.Generator().manual_seed(0))[:, 0] / 256
    assert abs(share.mean() - 0.5) < 5 * (variance / count) ** 0.5
    assert abs(share.var() - variance) < 0.03 * variance + 1e-4
    boxes = Extra(cutmix=alpha).draw(count, 64, 64, torch.Generator().manual_seed(0))
    assert set(boxes[:, 0].tolist()) == {256}
    inner = (boxes[:, 1] > 0) & (boxes[:, 2] < 64) & (boxes[:, 3] > 0) & (boxes[:, 4] < 64)
    sides = boxes[inner][:, 2] - boxes[inner][:, 1], boxes[inner][:, 4] - boxes[inner][:, 3]
    assert torch.equal(*sides)  # boxes have the ratio of the image


def test_of_mixup_and_cutmix_each_happens_to_half_of_the_images():
    draws = Extra(mixup=1.0, cutmix=1.0).draw(10_000, 32, 32, torch.Generator().manual_seed(0))
    boxed = draws[:, 1:].sum(1) > 0
    blended = draws[:, 0] < 256
    assert 0.47 < blended.float().mean() < 0.53
    assert not (blended & ((draws[:, 2] - draws[:, 1]) * (draws[:, 4] - draws[:, 3]) > 0)).any()
    assert boxed.float().mean() > 0.45


def test_even_a_batch_of_all_images_is_mixed_in_pairs():
    assert (extra(batch_size=50, mixup=1.0).batch(0)[1].count_nonzero(1) == 2).float().mean() > 0.9


@pytest.mark.parametrize("wrong", [{"cutout": -1}, {"mixup": 0.001}, {"cutmix": 1000.0}])
def test_extras_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*, expected 0"):
        Extra(**wrong)


def test_alternating_flips_mirror_each_image_in_every_other_epoch():
    made, flipped = extra(batch_size=50, alternating_flip=True), []
    for epoch in range(4):
        order, draws = made.plan(epoch)
        flipped.append(draws[:, -1][order.argsort()])
    assert torch.equal(flipped[0], flipped[2])
    assert torch.equal(flipped[1], flipped[3])
    assert torch.equal(flipped[0] + flipped[1], torch.ones(50, dtype=torch.int64))
    assert 10 < flipped[0].sum() < 40
    with pytest.raises(ValueError, match="alternating_flip is set, but the augmentation 'crop' does not flip"):
        extra(augment="crop", alternating_flip=True)
