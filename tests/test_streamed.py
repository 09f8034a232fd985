"""Image files streamed from the disk: batches that depend on their number alone, whoever makes them and from what."""

import errno
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mirrorquant.data import (
    Data,
    DataError,
    Extra,
    Images,
    Loader,
    Photos,
    StreamedLoader,
    cached,
    clean_batches,
    decoding,
    imagenet,
    load,
    loader,
    store,
    streamed,
)
from mirrorquant.data.augment import ResizedCrop
from mirrorquant.data.streamed import Paths
from mirrorquant.train import evaluate

Image = pytest.importorskip("PIL.Image")
DECODERS = ["pillow"] + (["simplejpeg"] if decoding._turbo() is not None else [])


@pytest.fixture(params=DECODERS)
def decoder(request, monkeypatch):
    if request.param == "pillow":
        monkeypatch.setattr(decoding, "_turbo", lambda: None)
    return request.param


def picture(path, seed, width=60, height=45, mode="RGB", **options):
    """A smooth random picture, so that a JPEG of it is close to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = torch.rand(1, 3, 4, 5, generator=torch.Generator().manual_seed(seed)) * 255
    pixels = F.interpolate(coarse, (height, width), mode="bilinear").byte()[0].permute(1, 2, 0).contiguous()
    image = Image.frombytes("RGB", (width, height), pixels.numpy().tobytes()).convert(mode)
    image.save(path, **({"quality": 95} if path.suffix.lower() != ".png" else {}) | options)
    return image


def tree(folder, train=12, val=5, classes=("cat", "dog"), suffix="JPEG", **options):
    chance = random.Random(0)
    for split, count in (("train", train), ("val", val)):
        for name in classes:
            for i in range(count):
                width, height = chance.randrange(30, 90), chance.randrange(30, 90)
                picture(folder / split / name / f"{i:02}.{suffix}", chance.randrange(10**9), width, height, **options)
    return folder


@pytest.fixture
def folder(tmp_path):
    return tree(tmp_path / "photos")


@pytest.fixture
def data(folder):
    return load(f"photos:{folder}:24")


def batches(data, count=4, *, workers=0, part=(0, 1), start=0, seed=3, batch_size=8):
    made = StreamedLoader(data, batch_size=batch_size, seed=seed, part=part, workers=workers)
    found = [made.batch(k) for k in range(start, start + count)]
    made.close()
    return found


def same(a, b):
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def all_same(a, b):
    return len(a) == len(b) and all(map(same, a, b))


def children():
    return {process.pid for process in multiprocessing.active_children()}


# Batches -------------------------------------------------------------------------------------------------------------


def test_a_batch_depends_on_its_number_alone(data, decoder):
    forward = batches(data, 10)
    backward = StreamedLoader(data, batch_size=8, seed=3, workers=0)
    for k in reversed(range(10)):
        assert same(backward.batch(k), forward[k])
    assert all_same(batches(data, 3, start=7, workers=2), forward[7:])
    assert not torch.equal(batches(data, 1, seed=4)[0][0], forward[0][0])


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_make_the_same_batches(data, workers):
    assert all_same(batches(data, 7, workers=workers), batches(data, 7))


@pytest.mark.parametrize("count", [2, 4])
def test_the_shares_of_several_processes_make_up_the_batch(data, count):
    shares = [batches(data, 4, part=(rank, count)) for rank in range(count)]
    joined = [tuple(torch.cat(parts) for parts in zip(*each, strict=True)) for each in zip(*shares, strict=True)]
    assert all_same(joined, batches(data, 4))


def test_a_jump_goes_on_from_there(data):
    expected = batches(data, 12)
    jumping = StreamedLoader(data, batch_size=8, seed=3, workers=2)
    for k in (0, 1, 7, 8, 9, 2, 3, 11, 0, 0):
        assert same(jumping.batch(k), expected[k]), k
    jumping.close()
    assert same(jumping.batch(5), expected[5])
    jumping.close()


def test_a_batch_stays_as_it_is_until_the_second_one_after_it(data):
    expected = [StreamedLoader(data, batch_size=8, seed=3, workers=0).raw(k) for k in range(20)]
    made = StreamedLoader(data, batch_size=8, seed=3, workers=2)
    before = made.raw(0)
    for k in range(1, 20):
        time.sleep(0.02)  # the workers write as far ahead as they may
        assert same(before, expected[k - 1])
        now = made.raw(k)
        assert same(before, expected[k - 1]), "the one before the last, too"
        before = now
    made.close()


def test_batches_are_bytes_in_channels_last_and_normalised_afterwards(data):
    made = StreamedLoader(data, batch_size=8, seed=0, workers=1)
    (pixels, labels), (x, y) = made.raw(2), made.batch(2)
    assert (pixels.dtype, pixels.shape, labels.dtype) == (torch.uint8, (8, 3, 24, 24), torch.int64)
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    assert x.dtype == torch.float32
    assert torch.equal(x, data.normalise(pixels.contiguous()))
    assert torch.equal(y, labels)
    assert made.waited > 0
    assert (made.batch_size, made.batches_per_epoch, made.data) == (8, 3, data)
    made.close()


def test_each_epoch_visits_each_image_once(tmp_path):
    for i in range(12):
        picture(tmp_path / "train" / f"{i:02}" / "one.png", i)
        picture(tmp_path / "val" / f"{i:02}" / "one.png", i)
    made = StreamedLoader(load(f"photos:{tmp_path}:16"), batch_size=4, seed=0, workers=0)
    orders = [torch.cat([made.raw(3 * epoch + k)[1] for k in range(3)]).tolist() for epoch in range(4)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len(set(map(tuple, orders))) == 4


def test_batches_leave_the_global_generator_alone(data):
    before = torch.get_rng_state()
    batches(data, 2, workers=1)
    list(clean_batches(data.val, data, 4))
    assert torch.equal(before, torch.get_rng_state())


def test_boxes_are_those_of_resized_crop():
    for height, width in ((48, 64), (500, 375), (40, 8), (7, 90)):
        uniform = torch.rand(4, 200, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        expected = ResizedCrop().draw(200, height, width, torch.Generator().manual_seed(0))[:, :4].tolist()
        numbers = uniform.transpose(0, 1).reshape(200, 40).tolist()
        assert [list(decoding.random_box(height, width, each)) for each in numbers] == expected


def test_a_box_is_cut_out_resized_and_mirrored_as_pillow_does_it(tmp_path, decoder):
    image = picture(tmp_path / "a.png", 1, 90, 70)
    photos = Photos((tmp_path / "a.png",), torch.tensor([0]), ("a",), size=32)
    for seed in range(20):
        uniform = torch.rand(41, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
        top, left, height, width = decoding.random_box(70, 90, uniform)
        expected = image.crop((left, top, left + width, top + height)).resize((32, 32), Image.Resampling.BILINEAR)
        if uniform[-1] < 0.5:
            expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        assert (photos.augmented(0, uniform).int() - tensor(expected)).abs().max() <= 2


def test_a_large_photograph_is_decoded_smaller_and_looks_the_same(tmp_path, decoder):
    image = picture(tmp_path / "large.jpg", 5, 801, 603)
    content = (tmp_path / "large.jpg").read_bytes()
    for box, factor in (
        ((0, 0, 603, 801), 8),
        ((101, 53, 400, 700), 4),
        ((3, 7, 255, 129), 2),
        ((300, 300, 127, 300), 1),
    ):
        found = decoding.decode(content, 64, lambda height, width, box=box: box)
        top, left, height, width = box
        assert (found.shape[0] - height / factor, found.shape[1] - width / factor) == pytest.approx((0, 0), abs=1)
        expected = image.crop((left, top, left + width, top + height)).resize((64, 64), Image.Resampling.BILINEAR)
        assert (decoding.resized(found, 64, 64).int() - tensor(expected)).abs().float().mean() < 2
    assert decoding.decode(content).shape == (603, 801, 3)


def tensor(image):
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3).int()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, expected 1 to 24"),
        ({"batch_size": 25}, "batch_size is 25, expected 1 to 24"),
        ({"augment": "crop-flip"}, "augment is 'crop-flip', expected one of resized-crop-flip, centre, none"),
        ({"part": (0, 3)}, "batch_size is 8, expected a multiple of 3, the number of processes"),
        ({"part": (2, 2)}, r"part is \(2, 2\), expected a rank from 0"),
        ({"workers": -2}, "workers is -2, expected -1"),
    ],
)
def test_wrong_arguments_are_refused(data, change, message):
    with pytest.raises(ValueError, match=message):
        loader(data, **{"batch_size": 8, "seed": 0, **change})


# Evaluation ----------------------------------------------------------------------------------------------------------


def reference(path, size):
    """The usual evaluation transform, by pillow: the shorter side to 8/7 of the size, then the centre."""
    image = Image.open(path).convert("RGB")
    least = round(size * 8 / 7)
    width, height = image.size
    sides = (least, least * height // width) if width <= height else (least * width // height, least)
    image = image.resize(sides, Image.Resampling.BILINEAR)
    left, top = round((image.width - size) / 2), round((image.height - size) / 2)
    return tensor(image.crop((left, top, left + size, top + size)))


def test_evaluation_sees_the_centre_of_every_image_once_in_order(data, decoder):
    found = list(clean_batches(data.val, data, 4))
    assert [len(y) for _, y in found] == [4, 4, 2]
    x, y = (torch.cat(parts) for parts in zip(*found, strict=True))
    assert torch.equal(y, data.val.labels)
    expected = torch.stack([reference(path, 24).permute(2, 0, 1) for path in data.val.paths])
    mean, std = (torch.tensor(v).view(3, 1, 1) * 255 for v in (data.mean, data.std))
    assert (x * std + mean - expected).abs().max() <= 2.01
    for name in ("centre", "none"):
        chosen = StreamedLoader(data, batch_size=24, seed=0, augment=name, workers=0).raw(0)
        assert chosen[1].bincount().tolist() == [12, 12]
        every = {image.numpy().tobytes() for image in chosen[0].contiguous()}
        assert every == {data.train.evaluated(i).permute(2, 0, 1).contiguous().numpy().tobytes() for i in range(24)}


def test_the_shares_of_an_evaluation_are_disjoint_and_complete(data):
    whole = [image for x, _ in clean_batches(data.val, data, 4) for image in x]
    images = Images(torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1), torch.arange(10) % 2, ("a", "b"))
    resident = Data("ten", images, images, images, (0.5,), (0.5,), "none")
    for count in (1, 2, 3, 7):
        for rank in range(count):
            share = [image for x, _ in clean_batches(data.val, data, 2, (rank, count)) for image in x]
            assert all_same(share, whole[rank::count])
            few = [y for _, y in clean_batches(images, resident, 2, (rank, count))]
            assert torch.cat(few).tolist() == images.labels[rank::count].tolist()


def test_workers_of_an_evaluation_wait_for_the_next_one_and_end_with_the_images(folder):
    data = load(f"photos:{folder}:24")
    before = children()
    first = list(streamed.clean_batches(data.val, data, 4, workers=2))
    kept = children() - before
    assert len(kept) == 2
    two = zip(*(streamed.clean_batches(data.val, data, 4, workers=2) for _ in range(2)), strict=True)
    assert all(same(a, b) and same(a, c) for (a, b), c in zip(two, first, strict=True))
    assert all_same(list(streamed.clean_batches(data.val, data, 4, workers=2)), first)
    assert len(children() - before) == 2
    del data, two
    assert not children() - before


def test_a_very_long_image_is_evaluated_by_its_middle(tmp_path):
    for width, height in ((3000, 2), (2, 3000), (1, 1)):
        picture(tmp_path / "long.png", 3, width, height)
        photos = Photos((tmp_path / "long.png",), torch.tensor([0]), ("a",))
        assert photos.evaluated(0).shape == (224, 224, 3)
        assert photos.augmented(0, [0.5] * 41).shape == (224, 224, 3)


# Kinds of files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mode"),
    [("a.jpg", "L"), ("a.jpeg", "CMYK"), ("a.png", "L"), ("a.png", "P"), ("a.PNG", "RGBA"), ("a.JPG", "RGB")],
)
def test_every_kind_of_image_becomes_rgb(tmp_path, decoder, name, mode):
    picture(tmp_path / name, 1, mode=mode)
    expected = tensor(Image.open(tmp_path / name).convert("RGB"))
    assert (decoding.decode((tmp_path / name).read_bytes()).int() - expected).abs().max() <= 1


def test_a_png_that_is_named_jpeg_is_read(tmp_path, decoder):
    image = picture(tmp_path / "a.png", 1)
    assert torch.equal(decoding.decode((tmp_path / "a.png").rename(tmp_path / "a.JPEG").read_bytes()), tensor(image))


def test_progressive_and_subsampled_jpegs_are_read_alike(tmp_path):
    for options in ({"progressive": True}, {"subsampling": 0}, {"subsampling": 2, "quality": 50}):
        picture(tmp_path / "a.jpg", 1, 61, 47, **options)
        expected = tensor(Image.open(tmp_path / "a.jpg").convert("RGB"))
        assert (decoding.decode((tmp_path / "a.jpg").read_bytes()).int() - expected).abs().max() <= 1


def test_without_pillow_the_error_says_what_to_install(data, monkeypatch):
    monkeypatch.setattr(decoding, "_turbo", lambda: None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    for workers in (0, 1):
        with pytest.raises(DataError, match=r"pip install 'mirrorquant\[images\]'") as caught:
            batches(data, 1, workers=workers)
        assert "Traceback" not in str(caught.value)


# Corrupt files -------------------------------------------------------------------------------------------------------


def damage(path, kind):
    content = path.read_bytes()
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "large":
        picture(path, 0, 200, 100)
    elif kind != "missing":
        path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "text": b"no image at all"}[kind])


@pytest.mark.parametrize("kind", ["cut", "empty", "text", "missing", "large", "fifo"])
def test_a_corrupt_file_is_named_and_the_next_image_takes_its_place(data, decoder, kind, monkeypatch):
    order = torch.randperm(24, generator=streamed.generator(3, 0)).tolist()
    bad, following = data.train.paths[order[9]], order[10]
    if kind == "large":
        monkeypatch.setattr("mirrorquant.data.pictures.MOST_PIXELS", 100 * 100)
    damage(bad, kind)
    for workers, part in ((0, (0, 1)), (2, (0, 1)), (0, (0, 2))):
        made = StreamedLoader(data, batch_size=8, seed=3, workers=workers, part=part)
        found = [(images.clone(), labels) for images, labels in map(made.raw, range(3))]
        made.close()
        assert [str(bad) in problem for problem in made.problems] == [True]
        assert int(found[1][1][1]) == int(data.train.labels[following])
        uniform = torch.rand(8, 41, generator=streamed.generator(3, 0, 1), dtype=torch.float64)[1].tolist()
        assert torch.equal(found[1][0][1], data.train.augmented(following, uniform).permute(2, 0, 1))
        again = StreamedLoader(data, batch_size=8, seed=3, workers=0, part=part)
        assert all_same([again.raw(k) for k in range(3)], found)


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_files_are_skipped_and_named_in_evaluation(data, monkeypatch, workers):
    every = list(clean_batches(data.val, data, 4, workers=workers))
    data.val.close()
    damage(data.val.paths[0], "cut")
    damage(data.val.paths[2], "empty")
    for _ in range(2):  # a second evaluation does not name them again
        found = list(clean_batches(data.val, data, 4, workers=workers))
        images, labels = (torch.cat(each) for each in zip(*found, strict=True))
        expected = [torch.cat(each) for each in zip(*every, strict=True)]
        kept = torch.tensor([1, *range(3, len(data.val))])
        assert all_same([(images, labels)], [(expected[0][kept], expected[1][kept])])
        assert [Path(problem.split(" cannot")[0]) for problem in data.val.problems] == [
            data.val.paths[0],
            data.val.paths[2],
        ]
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 24, len(data.classes)))
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).double().mean()
    assert evaluate.score(model, data.val, data, workers=workers).accuracy == pytest.approx(100 * float(right))
    monkeypatch.setattr(streamed, "CORRUPT", 1)
    with pytest.raises(DataError, match=r"2 or more of .* image files cannot be read, expected 1 at most"):
        list(clean_batches(data.val, data, 4, workers=workers))
    data.val.close()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_start_by_any_method(folder, method):
    code = f"""
import multiprocessing
import mirrorquant.data as mqd
if __name__ == "__main__":
    multiprocessing.set_start_method("{method}")
    data = mqd.load("photos:{folder}:24")
    made = mqd.loader(data, batch_size=8, seed=0, workers=1)
    print(made.raw(0)[0].shape[0], sum(len(y) for _, y in mqd.clean_batches(data.val, data, 4, workers=1)))
    made.close()
    data.val.close()
"""
    script = folder.parent / "script.py"
    script.write_text(code)
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout.split()[:1], found.stderr) == (0, ["8"], "")


def test_an_epoch_later_a_corrupt_file_is_not_named_again(data):
    damage(data.train.paths[5], "cut")
    made = StreamedLoader(data, batch_size=8, seed=3, workers=0)
    for k in range(9):
        made.raw(k)
    assert len(made.problems) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_corrupt_files_are_refused(data, monkeypatch, workers):
    monkeypatch.setattr(streamed, "CORRUPT", 2)
    for path in data.train.paths[:3]:
        damage(path, "empty")
    made = StreamedLoader(data, batch_size=8, seed=3, workers=workers)
    with pytest.raises(DataError, match=r"3 or more of 24 image files cannot be read, expected 2 at most. The first: "):
        go_on(made, 0, 3)
    made.close()


def test_if_no_file_can_be_read_the_error_names_the_first(data):
    for path in data.train.paths:
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"7 or more of 24 image files cannot be read, .*JPEG cannot .* \(empty\)"):
        batches(data, 1)


# Workers -------------------------------------------------------------------------------------------------------------


def test_closing_ends_the_workers_soon(data):
    before = children()
    made = StreamedLoader(data, batch_size=8, seed=0, workers=2)
    made.raw(0)
    assert len(children() - before) == 2
    start = time.monotonic()
    made.close()
    assert time.monotonic() - start < 5
    assert not children() - before
    made.raw(0)
    del made
    assert not children() - before


@pytest.mark.parametrize("end", ["", "made.close()", "raise SystemExit(0)", "del made, data", "import os; os._exit(0)"])
def test_a_program_ends_without_a_word_whether_closed_or_not(folder, end):
    code = f"""
import mirrorquant.data as mqd
data = mqd.load("photos:{folder}:24")
made = mqd.loader(data, batch_size=8, seed=0, workers=2)
made.raw(0)
list(mqd.clean_batches(data.val, data, 4))
stopped = mqd.clean_batches(data.val, data, 2)
next(stopped)
{end}
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_the_death_of_a_worker_is_reported_at_once(data):
    before = children()
    made = StreamedLoader(data, batch_size=8, seed=0, workers=2)
    made.raw(0)
    start = time.monotonic()
    pid = min(children() - before)
    with pytest.raises(DataError, match=r"A worker process .* fewer"):
        go_on(made, 1, 1000, kill=pid)
    assert time.monotonic() - start < 20
    made.close()
    assert all_same([made.batch(0)], batches(data, 1, seed=0))
    made.close()


def go_on(made, start, end, kill=None):
    if kill is not None:
        os.kill(kill, signal.SIGKILL)
        computed = time.monotonic() + 0.5
        while time.monotonic() < computed:  # as in a step: the death is no exception here
            pass
    for k in range(start, end):
        made.raw(k)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), MemoryError()])
def test_a_shortage_is_not_taken_for_a_corrupt_image(data, monkeypatch, error, workers):
    def read_regular(path):
        raise error

    monkeypatch.setattr(streamed._files, "read_regular", read_regular)
    made = StreamedLoader(data, batch_size=8, seed=3, workers=workers)
    with pytest.raises(
        DataError, match=r"could not be read \(.*(Too many open files|out of memory)\): the file may be"
    ):
        made.raw(0)
    made.close()


def test_grey_levels_of_sixteen_bits_are_scaled(tmp_path):
    levels = torch.arange(0, 65536, 16).view(64, 64).to(torch.uint16).numpy()
    for split in ("train", "val"):
        (tmp_path / split / "grey").mkdir(parents=True)
        Image.fromarray(levels).save(tmp_path / split / "grey" / "1.png")
    assert Image.open(tmp_path / "val/grey/1.png").mode.startswith("I")
    found = load(f"photos:{tmp_path}:56").val.read(0)
    assert found.shape == (64, 64, 3)
    difference = found[..., 0].int() - (torch.arange(0, 65536, 16) // 256).view(64, 64)
    assert difference.abs().max() <= 1


# Cache ---------------------------------------------------------------------------------------------------------------


def test_what_a_killed_process_had_written_of_a_cache_is_removed(data, tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    abandoned, used = (folder / f"photos-train-27-0123.pixels.{name}.writing" for name in ("dead", "alive"))
    recent = folder / "photos-train-27-0123.pixels.new.writing"
    abandoned.write_bytes(b"half")
    recent.write_bytes(b"half")
    with used.open("wb") as content:
        assert store._lock(content)
        for path in (abandoned, used):
            os.utime(path, (0, 0))
        cached(data, folder)
        assert recent.exists()
        assert (abandoned.exists(), used.exists()) == (False, True)
    assert sorted({path.suffix for path in folder.iterdir()}) == [".pixels", ".writing"]


@pytest.mark.parametrize("size", [56, 224])
def test_from_a_cache_come_the_same_images(folder, tmp_path, size, decoder):
    data = load(f"photos:{folder}:{size}")
    said = []
    stored = cached(data, tmp_path / "cache", said.append)
    assert len(said) == 2
    assert "24 of 24 images" in said[0]
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert stored.val is stored.test
    assert all_same(list(clean_batches(stored.val, stored, 4)), list(clean_batches(data.val, data, 4)))
    taken = torch.tensor([7, 2])
    assert torch.equal(stored.val.take(taken).evaluated(1), data.val.evaluated(2))
    for path in data.train.paths:
        path.unlink()  # nothing is decoded
    found = batches(stored, 3, workers=2)
    assert all_same(found, batches(stored, 3))
    tree(folder)
    for (a, label), (b, expected) in zip(found, batches(data, 3), strict=True):
        assert torch.equal(label, expected)
        difference = ((a - b).abs() * 255 * 0.23).mean()
        assert difference == 0 if size == 224 else difference < 6  # grey levels; small images are kept as they are


def test_a_cache_is_used_again_and_made_again_if_a_file_changes(folder, tmp_path):
    data = load(f"photos:{folder}:24")
    cached(data, tmp_path / "cache")
    said = []
    cached(load(f"photos:{folder}:24"), tmp_path / "cache", said.append)
    assert said == []
    picture(data.train.paths[3], 999)
    stored = cached(load(f"photos:{folder}:24"), tmp_path / "cache", said.append)
    assert len(said) == 2
    assert "is older or of another size: delete it if nothing else uses it" in said[0]
    assert all_same(list(clean_batches(stored.train, stored, 24)), list(clean_batches(data.train, data, 24)))


def test_a_damaged_cache_is_made_again(folder, tmp_path):
    data = load(f"photos:{folder}:24")
    cached(data, tmp_path / "cache")
    files = {file: file.read_bytes() for file in (tmp_path / "cache").iterdir()}
    file, content = next((file, content) for file, content in files.items() if "train" in file.name)
    for wrong in (b"", content[:-1], content + b"\0", content[1:], content[:-200] + bytes(200), bytes(100)):
        file.write_bytes(wrong)
        cached(data, tmp_path / "cache")
        assert {file: file.read_bytes() for file in (tmp_path / "cache").iterdir()} == files
    stored = cached(data, tmp_path / "cache")
    file.write_bytes(b"")
    with pytest.raises(DataError, match="is truncated: run again"):
        batches(stored, 1, workers=1)
    file.unlink()
    with pytest.raises(DataError, match=r"cannot be read \(No such file"):
        batches(stored, 1)


def test_corrupt_files_are_named_with_a_cache_too(data, tmp_path):
    damage(data.train.paths[4], "cut")
    made = StreamedLoader(cached(data, tmp_path / "cache"), batch_size=8, seed=3, workers=0)
    for k in range(3):
        made.raw(k)
    assert [str(data.train.paths[4]) in problem for problem in made.problems] == [True]


def test_a_cache_that_cannot_be_written_leaves_nothing_behind(data, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"could not be written .*do without the cache"):
        cached(data, tmp_path / "file")
    with pytest.raises(DataError, match="images of digits are in memory already"):
        cached(load("digits"), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


# Data sets -----------------------------------------------------------------------------------------------------------


def test_photos_are_listed_in_order_with_their_classes(tmp_path):
    tree(tmp_path, 3, 2, classes=("b", "a"), suffix="JPG")
    picture(tmp_path / "train" / "a" / "last.png", 0)
    (tmp_path / "train" / ".hidden").mkdir()
    (tmp_path / "val" / "a" / ".hidden").write_text("")
    data = load(f"photos:{tmp_path}")
    assert repr(data) == f"photos:{tmp_path}: 7 train, 4 val, 4 test images of 3×224×224 in 2 classes"
    assert data.classes == ("a", "b")
    assert [f"{path.parent.name}/{path.name}" for path in data.train.paths] == [
        *("a/00.JPG", "a/01.JPG", "a/02.JPG", "a/last.png"),
        *("b/00.JPG", "b/01.JPG", "b/02.JPG"),
    ]
    assert data.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert data.val is data.test
    moved = data.to("cpu")
    assert moved.val is moved.test
    picture(tmp_path / "test" / "b" / "one.jpg", 0)
    assert load(f"photos:{tmp_path}").test.labels.tolist() == [1]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("train/readme.txt", "readme.txt is not a folder of images of one class"),
        ("train/cat/notes.txt", "notes.txt is not named .png, .jpg or .jpeg"),
        ("val/cow/one.jpg", "the class cow has no training images"),
    ],
)
def test_wrong_folders_of_photos_are_refused(folder, file, message):
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text("")
    with pytest.raises(DataError, match=message):
        load(f"photos:{folder}")


def test_missing_folders_and_sizes_out_of_range_are_refused(folder):
    for text, message in (("", "photos: is not a folder"), (f"{folder}x", "is not a folder. Expected PATH/train")):
        with pytest.raises(DataError, match=message):
            load(f"photos:{text}")
    with pytest.raises(DataError, match="image size 0 is out of range, expected 1 to 1024"):
        load(f"photos:{folder}:0")
    (folder / "val" / "cat").rename(folder / "away")
    (folder / "val" / "cat").mkdir()
    with pytest.raises(DataError, match="cat has no images"):
        load(f"photos:{folder}")
    (folder / "val").rename(folder / "hidden")
    with pytest.raises(DataError, match=r"val cannot be read \(No such file.*Expected PATH/train"):
        load(f"photos:{folder}")


@pytest.mark.parametrize("place", ["imagenette", "imagenette2", "imagenette2-320", "imagenette2-160", ""])
def test_imagenette_is_found(tmp_path, place):
    tree(tmp_path / place, 1, 1, classes=[f"n{i:02}" for i in range(10)])
    data = load("imagenette", tmp_path)
    assert (data.name, len(data.classes), data.shape) == ("imagenette", 10, (3, 224, 224))


def test_missing_data_sets_say_what_to_put_where(tmp_path):
    with pytest.raises(DataError, match=rf"imagenette/train is missing. Unpack .*imagenette2-320.tgz in {tmp_path}"):
        load("imagenette", tmp_path)
    with pytest.raises(DataError, match=rf"imagenet/train is missing. Unpack .*image-net.org.* in {tmp_path}/imagenet"):
        load("imagenet", tmp_path)
    tree(tmp_path / "imagenette", 1, 1)
    with pytest.raises(DataError, match="has 2 classes of Imagenette, expected 10"):
        load("imagenette", tmp_path)


@pytest.mark.parametrize("place", ["", "imagenet", "ILSVRC/Data/CLS-LOC", "imagenet/ILSVRC/Data/CLS-LOC"])
def test_imagenet_is_found_in_its_layouts(tmp_path, monkeypatch, place):
    monkeypatch.setattr(imagenet, "CLASSES", 2)
    tree(tmp_path / place, 2, 1, classes=("n02", "n01"))
    data = load("imagenet", tmp_path)
    assert (data.name, data.classes, data.val.labels.tolist()) == ("imagenet", ("n01", "n02"), [0, 1])
    monkeypatch.undo()
    with pytest.raises(DataError, match="train has 2 classes, expected 1000"):
        load("imagenet", tmp_path)


@pytest.fixture
def flat(tmp_path, monkeypatch):
    """Official validation images, which lie in one folder."""
    monkeypatch.setattr(imagenet, "CLASSES", 2)
    tree(tmp_path, 2, 0, classes=("n02", "n01"))
    for i in range(1, 4):
        picture(tmp_path / "val" / f"ILSVRC2012_val_{i:08}.JPEG", i)
    return tmp_path


KAGGLE = "ImageId,PredictionString\n" + "".join(
    f"ILSVRC2012_val_{i:08},{wnid} 85 1 499 272 {wnid} 1 2 3 4\n" for i, wnid in ((3, "n01"), (1, "n02"), (2, "n01"))
)
BY_NUMBER = "".join(f"ILSVRC2012_val_{i:08}.JPEG {label}\n" for i, label in ((1, 1), (2, 0), (3, 0)))
BY_ID = "".join(f"val/ILSVRC2012_val_{i:08}.JPEG n0{label}\n" for i, label in ((1, 2), (2, 1), (3, 1)))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("LOC_val_solution.csv", KAGGLE),
        ("val.txt", BY_NUMBER),
        ("val.txt", BY_ID + "\n"),
        ("val/val.txt", BY_ID),
    ],
)
def test_flat_validation_images_get_their_labels_from_a_file(flat, name, content):
    (flat / name).write_text(content)
    assert load("imagenet", flat).val.labels.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("other.txt", BY_ID, "put LOC_val_solution.csv there, or val.txt with the lines FILE CLASS"),
        ("ILSVRC2012_validation_ground_truth.txt", "490\n361\n171\n", "numbers the classes in another order"),
        ("val.txt", BY_ID.replace("n01", "n09"), "expected a file and one of 2 classes"),
        ("val.txt", BY_NUMBER.replace("1\n", "2\n"), "expected a file and one of 2 classes"),
        ("val.txt", BY_ID[:-37], "does not name the class of ILSVRC2012_val_00000003.JPEG"),
    ],
)
def test_flat_validation_images_without_labels_are_refused(flat, name, content, message):
    (flat / name).write_text(content)
    with pytest.raises(DataError, match=message):
        load("imagenet", flat)


# Splits --------------------------------------------------------------------------------------------------------------


def test_paths_behave_like_a_tuple(tmp_path):
    names = [tmp_path / f"{'é' * i}{i}.png" for i in range(7)]
    paths = Paths(names)
    assert list(paths) == names
    assert (paths[-1], len(paths), names[3] in paths) == (names[-1], 7, True)
    assert list(paths[5:1:-2]) == names[5:1:-2]
    assert list(paths.take(torch.tensor([6, 0])) + paths[:2]) == [names[6], names[0], *names[:2]]
    assert list(paths.texts()) == list(map(str, names))
    with pytest.raises(IndexError):
        paths[7]


def test_data_of_files_can_be_resized_and_joined(data, tmp_path):
    other = data.resized(16)
    assert (other.shape, other.val is other.test, data.shape) == ((3, 16, 16), True, (3, 24, 24))
    assert batches(other, 1)[0][0].shape == (8, 3, 16, 16)
    assert cached(data, tmp_path / "cache").resized(16).train.store is None
    with pytest.raises(DataError, match="images of digits are stored at 8×8, not 16×16"):
        load("digits").resized(16)
    with pytest.raises(DataError, match="has no validation images of its own"):
        data.joined()
    separate = Data("own", data.train, data.val, data.val.take(slice(3)), data.mean, data.std, data.augment).joined()
    assert list(separate.train.paths) == [*data.train.paths, *data.val.paths]
    assert separate.train.labels.tolist() == [*data.train.labels.tolist(), *data.val.labels.tolist()]
    with pytest.raises(DataError, match="must both be in memory or both be files"):
        Data("mixed", data.train, load("digits").val, data.val, data.mean, data.std, data.augment)


def test_the_loader_fits_the_data(data):
    assert isinstance(loader(data, batch_size=8, seed=0), StreamedLoader)
    digits = load("digits")
    assert isinstance(loader(digits, batch_size=8, seed=0), Loader)
    with pytest.raises(ValueError, match="are in memory, expected image files: use Loader"):
        StreamedLoader(digits, batch_size=8, seed=0)
    with pytest.raises(ValueError, match="are files, expected images in memory: use StreamedLoader"):
        Loader(data, batch_size=8, seed=0)
    with pytest.raises(ValueError, match="are streamed from files: cutout, mixup, cutmix and alternating_flip need"):
        loader(data, batch_size=8, seed=0, extra=Extra(cutout=4))


def test_the_shares_of_images_in_memory_make_up_the_batch():
    digits = load("digits")
    whole = Loader(digits, batch_size=60, seed=1)
    shares = [Loader(digits, batch_size=60, seed=1, part=(rank, 3)) for rank in range(3)]
    for k in (0, 5, whole.batches_per_epoch):
        parts = [share.batch(k) for share in shares]
        assert same([torch.cat(each) for each in zip(*parts, strict=True)], whole.batch(k))
    assert shares[0].batch_size == 60
    with pytest.raises(ValueError, match="batch_size is 64, expected a multiple of 3"):
        Loader(digits, batch_size=64, seed=1, part=(0, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_for_a_gpu_are_pinned_and_normalised_there(data):
    there = StreamedLoader(data.to("cuda"), batch_size=8, seed=3, workers=2)
    pixels = there.raw(0)[0]
    assert pixels.is_pinned()
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    x, y = there.batch(1)
    assert x.device.type == y.device.type == "cuda"
    assert same((x.cpu(), y.cpu()), batches(data, 2)[1])
    there.close()
