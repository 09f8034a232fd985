"""Data sets: each format is read back from files written here, and wrong files raise errors that name them."""

import copy
import gzip
import hashlib
import os
import random
import stat
import sys
import tarfile
import urllib.error
import zlib

import numpy as np
import pytest
import torch

from mirrorquant import data as mqd
from mirrorquant.data import DataError, Images, cifar, digits, fashion_mnist, load, tiny_imagenet
from mirrorquant.data.base import statistics

RECORDS, PER_CLASS = 20, {"train.bin": 2, "test.bin": 1}
NAMES = list(cifar.CIFAR10_SHA256)


def noise(seed, *shape, high=256):
    return np.random.default_rng(seed).integers(0, high, shape, dtype=np.uint8)


# CIFAR-10 ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cifar10_records(monkeypatch):
    """Six small batches in place of the official ones, and their digests."""
    records = {
        n: np.concatenate([noise(i, RECORDS, 1, high=10), noise(i, RECORDS, 3072)], 1) for i, n in enumerate(NAMES)
    }
    monkeypatch.setattr(cifar, "CIFAR10_RECORDS", RECORDS)
    monkeypatch.setattr(cifar, "VAL", 10)
    digests = {name: hashlib.sha256(r.tobytes()).hexdigest() for name, r in records.items()}
    monkeypatch.setattr(cifar, "CIFAR10_SHA256", digests)
    return records


def write_binary(folder, records):
    folder.mkdir(parents=True)
    for name, content in records.items():
        (folder / name).write_bytes(content.tobytes())


def check_cifar10(data, records):
    train = np.concatenate([records[name] for name in NAMES[:5]])
    assert (len(data.train), len(data.val), len(data.test)) == (90, 10, 20)
    assert data.shape == (3, 32, 32)
    images, labels = torch.cat([data.train.images, data.val.images]), torch.cat([data.train.labels, data.val.labels])
    assert np.array_equal(images.numpy(), train[:, 1:].reshape(-1, 3, 32, 32))
    assert np.array_equal(labels.numpy(), train[:, 0])
    assert np.array_equal(data.test.labels.numpy(), records["test_batch.bin"][:, 0])


def test_cifar10_is_read_from_its_binary_folder_or_its_parent(tmp_path, cifar10_records):
    write_binary(tmp_path / "cifar-10-batches-bin", cifar10_records)
    check_cifar10(load("cifar10", tmp_path, download=False), cifar10_records)
    check_cifar10(load("cifar10", tmp_path / "cifar-10-batches-bin", download=False), cifar10_records)


def test_beside_the_python_version_of_cifar10_the_binary_one_is_asked_for(tmp_path, cifar10_records):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(b"a pickle, which is never opened")
    with pytest.raises(DataError, match=r"cifar-10-batches-bin/data_batch_1.bin is missing.* Unpack .*-binary.tar.gz"):
        load("cifar10", tmp_path, download=False)
    write_binary(tmp_path / "cifar-10-batches-bin", cifar10_records)
    check_cifar10(load("cifar10", tmp_path, download=False), cifar10_records)


def test_a_missing_file_is_named(tmp_path, cifar10_records):
    write_binary(tmp_path / "cifar-10-batches-bin", cifar10_records)
    (tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_4.bin is missing, .*Unpack https://www.cs.toronto"):
        load("cifar10", tmp_path, download=False)


# CIFAR-100 -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cifar100_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "CIFAR100_PER_CLASS", PER_CLASS)
    monkeypatch.setattr(cifar, "VAL", 10)
    (tmp_path / "cifar-100-binary").mkdir()
    for name, per_class in PER_CLASS.items():
        fine = np.random.default_rng(per_class).permutation(np.arange(100, dtype=np.uint8).repeat(per_class))
        coarse = noise(per_class, len(fine), 1, high=20)
        records = np.concatenate([coarse, fine[:, None], noise(per_class, len(fine), 3072)], 1)
        (tmp_path / "cifar-100-binary" / name).write_bytes(records.tobytes())
    return tmp_path / "cifar-100-binary"


def test_cifar100_is_read_with_its_fine_labels(cifar100_folder):
    found = load("cifar100", cifar100_folder.parent, download=False)
    records = np.frombuffer((cifar100_folder / "train.bin").read_bytes(), np.uint8).reshape(200, 3074)
    assert np.array_equal(found.train.labels.numpy(), records[:190, 1])
    assert np.array_equal(found.val.images.numpy(), records[190:, 2:].reshape(-1, 3, 32, 32))
    assert (len(found.train), len(found.val), len(found.test)) == (190, 10, 100)
    assert (len(found.classes), found.classes[0], found.classes[99]) == (100, "apple", "worm")
    assert len(load("cifar100", cifar100_folder).test) == 100


@pytest.mark.parametrize("value", [100, None])
def test_cifar100_labels_are_checked(cifar100_folder, value):
    content, offset = bytearray((cifar100_folder / "train.bin").read_bytes()), 3074 * 5 + 1
    content[offset] = (content[offset] + 1) % 20 if value is None else value
    (cifar100_folder / "train.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"labels in .*train.bin are damaged, expected 2 images per class"):
        load("cifar100", cifar100_folder)


# Fashion-MNIST -------------------------------------------------------------------------------------------------------


@pytest.fixture
def fashion_files(monkeypatch):
    monkeypatch.setattr(fashion_mnist, "VAL", 5)
    monkeypatch.setattr(fashion_mnist, "SYSTEM", fashion_mnist.SYSTEM / "not here")
    files, facts = {}, {}
    for i, name in enumerate(fashion_mnist.FILES):
        shape = (40 if name.startswith("train") else 10, *((28, 28) if "images" in name else ()))
        header = np.array([0x800 + len(shape), *shape], ">u4").tobytes()
        files[name] = header + noise(i, *shape, high=256 if len(shape) == 3 else 10).tobytes()
        facts[name] = shape[0], hashlib.sha256(files[name]).hexdigest()
    monkeypatch.setattr(fashion_mnist, "FILES", facts)
    return files


@pytest.mark.parametrize("place", ["", "fashion-mnist", "FashionMNIST/raw"])
@pytest.mark.parametrize("compressed", [True, False])
def test_fashion_mnist_is_read_compressed_or_not(tmp_path, fashion_files, place, compressed):
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    for name, content in fashion_files.items():
        path = tmp_path / place / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(content) if compressed else content)
    found = load("fashion-mnist", tmp_path, download=False)
    assert (len(found.train), len(found.val), len(found.test), found.shape) == (35, 5, 10, (1, 28, 28))
    pixels = np.frombuffer(fashion_files["train-images-idx3-ubyte"][16:], np.uint8).reshape(40, 1, 28, 28)
    assert np.array_equal(torch.cat([found.train.images, found.val.images]).numpy(), pixels)
    assert found.test.labels.tolist() == list(fashion_files["t10k-labels-idx1-ubyte"][8:])


def test_a_file_that_unpacks_without_end_is_refused(tmp_path, fashion_files):
    for name, content in fashion_files.items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(1 << 22)))
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte.gz has more than 7,856 bytes, expected 7,856"):
        load("fashion-mnist", tmp_path, download=False)


def test_fashion_mnist_of_the_system_is_complete():
    if not fashion_mnist.SYSTEM.is_dir():
        pytest.skip("needs the Debian package dataset-fashion-mnist")
    found = load("fashion-mnist", "nowhere", download=False)
    assert (len(found.train), len(found.val), len(found.test)) == (55_000, 5_000, 10_000)
    assert found.train.labels.bincount().min() > 5_000


# Damage --------------------------------------------------------------------------------------------------------------


def damaged(content, chance):
    """One file with something wrong: a flipped bit, a cut or added end, bytes gone from the middle, nothing at all."""
    place = chance.randrange(len(content))
    kind = chance.randrange(6)
    if kind <= 1:
        return content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]
    if kind == 2:
        return content[:place]
    if kind == 3:
        return content + chance.randbytes(chance.randrange(1, 100))
    if kind == 4:
        return content[:place] + content[place + chance.randrange(1, 10) :]
    return bytes([content[0] ^ 0xFF]) + content[1:]


def formats(tmp_path, cifar10_records, fashion_files):
    """Folders of the formats that carry digests: the name to load, and the files."""
    write_binary(tmp_path / "a" / "cifar-10-batches-bin", cifar10_records)
    for folder, compress in (("c", gzip.compress), ("d", bytes)):
        (tmp_path / folder).mkdir()
        for name, content in fashion_files.items():
            file = tmp_path / folder / (f"{name}.gz" if folder == "c" else name)
            file.write_bytes(compress(content))
    for folder, name in (("a", "cifar10"), ("c", "fashion-mnist"), ("d", "fashion-mnist")):
        root = tmp_path / folder
        yield name, root, sorted(file for file in root.rglob("*") if file.is_file())


def test_201_damaged_files_are_each_refused_by_name_or_hold_the_same(tmp_path, cifar10_records, fashion_files):
    """A gzip header has bytes that mean nothing: with those changed the very same images may be read."""
    chance, refused = random.Random(0), []
    for name, root, files in formats(tmp_path, cifar10_records, fashion_files):
        good = load(name, root, download=False)
        for _ in range(67):
            file = chance.choice(files)
            content = file.read_bytes()
            file.write_bytes(damaged(content, chance))
            try:
                found = load(name, root, download=False)
            except DataError as error:
                refused.append((str(file), str(error)))
            else:
                assert root.name == "c"
                for split in ("train", "val", "test"):
                    assert torch.equal(getattr(found, split).images, getattr(good, split).images)
                    assert torch.equal(getattr(found, split).labels, getattr(good, split).labels)
            file.write_bytes(content)
    assert all(file in message for file, message in refused)
    assert len(refused) >= 180


def test_cut_or_longer_cifar100_files_are_refused(cifar100_folder):
    """Only sizes and labels are checked there: a changed pixel is not noticed."""
    file = cifar100_folder / "train.bin"
    content = file.read_bytes()
    for wrong in (b"", content[:-1], content[:3074], content + b"\0", content * 2):
        file.write_bytes(wrong)
        found = f"{len(wrong):,}" if len(wrong) < len(content) else f"more than {len(content):,}"
        with pytest.raises(DataError, match=f"train.bin has {found} bytes, expected {len(content):,}"):
            load("cifar100", cifar100_folder)


# Downloads -----------------------------------------------------------------------------------------------------------


def archive(tmp_path, monkeypatch, records, md5=None):
    write_binary(tmp_path / "made" / "cifar-10-batches-bin", records)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "made" / "cifar-10-batches-bin", "cifar-10-batches-bin")
    digest = hashlib.md5((tmp_path / "a.tar.gz").read_bytes()).hexdigest()
    monkeypatch.setattr(cifar, "CIFAR10_URL", (tmp_path / "a.tar.gz").as_uri())
    monkeypatch.setattr(cifar, "CIFAR10_MD5", md5 or digest)


def test_a_missing_data_set_is_downloaded_once(tmp_path, monkeypatch, cifar10_records):
    archive(tmp_path, monkeypatch, cifar10_records)
    check_cifar10(load("cifar10", tmp_path / "data"), cifar10_records)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["cifar-10-batches-bin"]
    (tmp_path / "a.tar.gz").unlink()
    check_cifar10(load("cifar10", tmp_path / "data"), cifar10_records)


def test_a_download_with_another_checksum_leaves_nothing_behind(tmp_path, monkeypatch, cifar10_records):
    archive(tmp_path, monkeypatch, cifar10_records, md5="0" * 32)
    with pytest.raises(DataError, match=r"has the MD5 .*, expected 00000"):
        load("cifar10", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_missing_files_of_an_archive_are_completed(tmp_path, monkeypatch, cifar10_records):
    archive(tmp_path, monkeypatch, cifar10_records)
    load("cifar10", tmp_path / "data")
    (tmp_path / "data" / "cifar-10-batches-bin" / "data_batch_4.bin").unlink()
    check_cifar10(load("cifar10", tmp_path / "data"), cifar10_records)


@pytest.mark.parametrize("name", ["../outside", "/outside", "cifar-10-batches-bin/../../outside"])
def test_an_archive_writes_nothing_but_the_files_of_the_data_set(tmp_path, monkeypatch, name):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for member in (name, f"{name}/test_batch.bin"):
            tar.addfile(tarfile.TarInfo(member))
    monkeypatch.setattr(cifar, "CIFAR10_URL", (tmp_path / "a.tar").as_uri())
    monkeypatch.setattr(cifar, "CIFAR10_MD5", hashlib.md5((tmp_path / "a.tar").read_bytes()).hexdigest())
    with pytest.raises(DataError, match=r"data_batch_1\.bin cannot be read"):
        load("cifar10", tmp_path / "data")
    written = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(map(str, written)) == ["a.tar", "data/cifar-10-batches-bin/test_batch.bin"]


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion-mnist"])
def test_without_network_the_error_says_what_to_put_where(tmp_path, monkeypatch, name):
    def unreachable(*_, **__):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    monkeypatch.setattr(fashion_mnist, "SYSTEM", tmp_path / "no")
    with pytest.raises(DataError, match=f"cannot be downloaded.*no route to host.*(Unpack|Put) .*{tmp_path}"):
        load(name, tmp_path)
    with pytest.raises(DataError, match=r"downloading is off. (Unpack|Put)"):
        load(name, tmp_path, download=False)


def test_a_download_of_several_files_that_broke_off_goes_on(tmp_path, monkeypatch, fashion_files):
    site = tmp_path / "site"
    site.mkdir()
    for name, content in fashion_files.items():
        (site / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
    monkeypatch.setattr(fashion_mnist, "URL", f"{site.as_uri()}/")
    last = (site / "t10k-labels-idx1-ubyte.gz").rename(tmp_path / "away")
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz cannot be downloaded"):
        load("fashion-mnist", tmp_path / "data")
    last.rename(site / "t10k-labels-idx1-ubyte.gz")
    for name in list(fashion_files)[:3]:
        (site / f"{name}.gz").unlink()  # these are there already
    assert len(load("fashion-mnist", tmp_path / "data").test) == 10


def test_the_root_may_be_a_file(tmp_path):
    (tmp_path / "data").write_text("")
    for name in ("cifar10", "cifar100", "tinyimagenet"):
        with pytest.raises(DataError, match="data"):
            load(name, tmp_path / "data", download=False)


# Image files ---------------------------------------------------------------------------------------------------------


def picture(path, seed, width=64, height=64, **options):
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = noise(seed, height, width, 3)
    image.fromarray(pixels).save(path, **options)
    return pixels


@pytest.fixture
def tiny_folder(tmp_path, monkeypatch):
    for name, value in {"CLASSES": 2, "TRAIN": 3, "VAL": 2}.items():
        monkeypatch.setattr(tiny_imagenet, name, value)
    root = tmp_path / "tiny-imagenet-200"
    for c, wnid in enumerate(("n02", "n01")):
        for i in range(3):
            picture(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", 10 * c + i)
    for i in range(4):
        picture(root / "val" / "images" / f"val_{i}.JPEG", 100 + i)
    rows = [f"val_{i}.JPEG\t{('n01', 'n02')[i % 2]}\t0\t1\t2\t3\n" for i in range(4)]
    (root / "val" / "val_annotations.txt").write_text("".join(rows))
    (root / "wnids.txt").write_text("n02\nn01\n")
    return root


def test_tinyimagenet_is_read_decoded_once_and_tested_on_its_validation_set(tiny_folder):
    image = pytest.importorskip("PIL.Image")
    found = load("tinyimagenet", tiny_folder.parent)
    assert found.classes == ("n01", "n02")
    assert found.val is found.test
    moved = found.to("cpu")
    assert moved.val is moved.test
    assert found.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.val.labels.tolist() == [0, 1, 0, 1]
    first = np.asarray(image.open(tiny_folder / "train" / "n01" / "images" / "n01_0.JPEG")).transpose(2, 0, 1)
    assert np.array_equal(found.train.images[0].numpy(), first)
    again = load("tinyimagenet", tiny_folder)
    assert torch.equal(again.train.images, found.train.images)
    picture(tiny_folder / "val" / "images" / "val_3.JPEG", 999)
    assert not torch.equal(load("tinyimagenet", tiny_folder).val.images[3], found.val.images[3])


def test_a_damaged_cache_of_tinyimagenet_is_made_again(tiny_folder):
    good = load("tinyimagenet", tiny_folder)
    cache = tiny_folder / tiny_imagenet.CACHE
    content = cache.read_bytes()
    for wrong in (content[:-1], content + b"\0", bytes([content[0] ^ 1]) + content[1:], content[:40], b""):
        cache.write_bytes(wrong)
        assert torch.equal(load("tinyimagenet", tiny_folder).train.images, good.train.images)
        assert cache.read_bytes() == content


def test_a_cache_that_matches_is_used_instead_of_the_images(tiny_folder, monkeypatch):
    good = load("tinyimagenet", tiny_folder)
    monkeypatch.setattr("mirrorquant.data.pictures.decode", lambda *_, **__: pytest.fail("the images were decoded"))
    assert torch.equal(load("tinyimagenet", tiny_folder).val.images, good.val.images)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("wnids.txt", "n01\nn01\n", "wnids.txt lists 1 classes, expected 2"),
        ("wnids.txt", "n01\nn02\nn03\n", "wnids.txt lists 3 classes"),
        ("wnids.txt", "n01\nn\xe9\n", "train has 0 images of the class n\xe9, expected 3"),
        ("train/n01/images/more.JPEG", "", "train has 4 images of the class n01, expected 3"),
        ("train/n01/images/n01_1.JPEG", "not a picture", "n01_1.JPEG cannot be read as an image"),
        ("val/val_annotations.txt", "val_0.JPEG\tn09\t0\t0\t0\t0\n", "val has 0 images of the class n01, expected 2"),
        ("val/val_annotations.txt", "val_0.JPEG\tn01\t0\t0\t0\t0\n", "val has 1 images of the class n01, expected 2"),
    ],
)
def test_wrong_files_of_tinyimagenet_are_refused(tiny_folder, file, content, message):
    (tiny_folder / file).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        load("tinyimagenet", tiny_folder)


def test_missing_cut_or_small_pictures_are_refused_by_name(tiny_folder):
    file = tiny_folder / "val" / "images" / "val_2.JPEG"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"val_2.JPEG cannot be read as an image"):
        load("tinyimagenet", tiny_folder)
    picture(file, 0, width=63)
    with pytest.raises(DataError, match=r"val_2.JPEG has 63×64 pixels, expected 64×64"):
        load("tinyimagenet", tiny_folder)
    file.unlink()
    with pytest.raises(DataError, match=r"val_2.JPEG cannot be read"):
        load("tinyimagenet", tiny_folder)


def test_image_files_without_pillow_say_what_to_install(tiny_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DataError, match=r"pip install 'mirrorquant\[images\]'"):
        load("tinyimagenet", tiny_folder)


def test_a_folder_is_split_the_same_way_each_time(tmp_path):
    for c in "ab":
        for i in range(20):
            picture(tmp_path / c / f"{i:02}.png", i + 100 * (c == "b"), 10, 8)
    found = load(f"folder:{tmp_path}:8")
    assert (len(found.train), len(found.val), len(found.test)) == (32, 4, 4)
    assert (found.shape, found.classes) == ((3, 8, 8), ("a", "b"))
    every = torch.cat([found.train.images, found.val.images, found.test.images])
    assert len({image.numpy().tobytes() for image in every}) == 40
    assert found.mean == statistics(found.train.images)[0]
    assert torch.equal(load(f"folder:{tmp_path}:8").val.images, found.val.images)


def test_a_folder_of_the_right_height_is_cut_at_its_centre(tmp_path):
    for split in ("train", "test"):
        pixels = [picture(tmp_path / split / "a" / f"{i}.png", i, 12, 8) for i in range(2)]
    found = load(f"folder:{tmp_path}:8")
    assert np.array_equal(found.test.images[1].numpy(), pixels[1][:, 2:10].transpose(2, 0, 1))
    assert (len(found.train), len(found.val)) == (1, 1)


def test_a_folder_with_val_alone_tests_on_it(tmp_path):
    for split in ("train", "val"):
        picture(tmp_path / split / "a" / "0.jpg", 0, 70, 90)
    found = load(f"folder:{tmp_path}")
    assert found.val is found.test
    assert found.shape == (3, 64, 64)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "has no classes"),
        (["a/0.png", "a/1.png"], "a has 2 images, expected at least 3 to split"),
        (["a/0.png", "a/notes.txt"], "notes.txt is not named .png"),
        (["0.png"], "0.png is not a folder"),
        (["train/a/0.png"], "has train/ but neither val/ nor test/"),
        (["train/a/0.png", "val/b/0.png"], "the class b has no training images"),
        (["train/a/0.png", "val/a/bad.png"], "bad.png cannot be read as an image"),
    ],
)
def test_wrong_folders_are_refused(tmp_path, files, message):
    for file in files:
        if file.endswith(("0.png", "1.png")):
            picture(tmp_path / file, 0)
        else:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text("not a picture")
    with pytest.raises(DataError, match=message):
        load(f"folder:{tmp_path}")


# What is shipped or made ---------------------------------------------------------------------------------------------


def test_digits_are_the_published_ones_in_three_disjoint_splits():
    found = digits.load()
    splits = (found.train, found.val, found.test)
    assert [len(split) for split in splits] == [1257, 180, 360]
    labels = torch.cat([split.labels for split in splits])
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert found.val.labels.bincount().tolist() == [18] * 10
    assert found.test.labels.bincount().tolist() == [36] * 10
    pixels = torch.cat([split.images for split in splits]).long()
    ink = (pixels * 16 + 254) // 255
    assert (ink.min(), ink.max()) == (0, 16)
    assert torch.equal(ink * 255 // 16, pixels)
    found_records = torch.cat([ink.view(-1, 64), labels[:, None]], 1).byte().numpy()
    shipped = np.frombuffer(gzip.decompress(digits.FILE.read_bytes()), np.uint8).reshape(-1, 65)
    assert sorted(row.tobytes() for row in found_records) == sorted(row.tobytes() for row in shipped)


def test_damaged_digits_are_refused(tmp_path, monkeypatch):
    content, chance = digits.FILE.read_bytes(), random.Random(0)
    monkeypatch.setattr(digits, "FILE", tmp_path / "digits.bin.gz")
    for _ in range(20):
        (tmp_path / "digits.bin.gz").write_bytes(content[: chance.randrange(len(content))])
        with pytest.raises(DataError, match=r"digits.bin.gz .*Install mirrorquant again"):
            load("digits")


def test_synthetic_images_are_the_same_each_time_and_tell_their_class():
    one, two = (load("synthetic:3x16x12:5") for _ in range(2))
    assert one.shape == (3, 16, 12)
    assert torch.equal(one.train.images, two.train.images)
    means = torch.stack([one.train.images[one.train.labels == c].float().mean(0) for c in range(5)]).flatten(1)
    nearest = torch.cdist(one.test.images.float().flatten(1), means).argmin(1)
    assert torch.equal(nearest, one.test.labels)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar-10", "no data set 'cifar-10'. Did you mean 'cifar10'"),
        ("CIFAR100", "Did you mean 'cifar100'"),
        ("fashion_mnist", "Did you mean 'fashion-mnist'"),
        ("tiny-imagenet", "Did you mean 'tinyimagenet'"),
        ("synthetic", "Did you mean 'synthetic:CxHxW:CLASSES'"),
        ("synthetic:3x32:10", "expected synthetic:CxHxW:CLASSES"),
        ("folder:", "folder: is not a folder"),
        ("", "There is no data set ''. Expected one of cifar10"),
        ("synthetic:3x0x32:10", "out of range"),
        ("synthetic:3x32x32:1", "out of range"),
        ("folder:nowhere/at/all", "nowhere/at/all is not a folder"),
    ],
)
def test_a_name_that_is_not_one_gets_the_nearest(name, message):
    with pytest.raises(DataError, match=message):
        load(name)


def test_one_function_adds_a_data_set(monkeypatch):
    monkeypatch.setattr(mqd.registry, "_SETS", copy.copy(mqd.registry._SETS))

    @mqd.register("digits-again", label="Digits again", shape=(1, 8, 8), classes=10)
    def again(root, *, download):
        return load("digits")

    assert "digits-again" in mqd.names()
    assert mqd.label("digits-again") == "Digits again"
    assert len(load("digits-again").train) == 1257
    with pytest.raises(DataError, match="There is already a data set 'digits-again'"):
        mqd.register("digits-again")(again)


def test_what_is_known_of_a_data_set_is_so():
    assert (mqd.get("digits").shape, mqd.get("digits").classes) == (load("digits").shape, 10)
    assert mqd.get("cifar100").classes == len(cifar.CIFAR100_CLASSES)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 3, 4, 4), torch.zeros(2).long(), "torch.float32"),
        (torch.zeros(2, 4, 4).byte(), torch.zeros(2).long(), "expected torch.uint8 of shape N×C×H×W"),
        (torch.zeros(2, 3, 4, 4).byte(), torch.zeros(3).long(), r"shape \(3,\), expected torch.int64 of shape \(2,\)"),
        (torch.zeros(2, 3, 4, 4).byte(), torch.tensor([0, 2]), "labels run from 0 to 2, expected 0 to 1"),
        (torch.zeros(0, 3, 4, 4).byte(), torch.zeros(0).long(), "no images"),
    ],
)
def test_images_that_are_not_are_refused(images, labels, message):
    with pytest.raises(DataError, match=message):
        Images(images, labels, ("a", "b"))


@pytest.mark.skipif("MIRRORQUANT_CIFAR10" not in os.environ, reason="MIRRORQUANT_CIFAR10 names no folder")
def test_the_real_cifar10_has_its_known_channel_means():
    found = load("cifar10", os.environ["MIRRORQUANT_CIFAR10"], download=False)
    assert (len(found.train), len(found.val), len(found.test)) == (45_000, 5_000, 10_000)
    mean, _ = statistics(torch.cat([found.train.images, found.val.images]))
    assert [round(m, 8) for m in mean] == [0.49139968, 0.48215841, 0.44653091]


# Files that were made to do harm -------------------------------------------------------------------------------------


def split_folder(tmp_path):
    """A folder of one class with a good image to train; where the one to test belongs."""
    picture(tmp_path / "train" / "a" / "0.png", 0, 12, 8)
    picture(tmp_path / "train" / "a" / "1.png", 1, 12, 8)
    (tmp_path / "test" / "a").mkdir(parents=True)
    return tmp_path / "test" / "a" / "0.png"


def test_a_long_thin_image_is_not_blown_up_before_it_is_cut(tmp_path, monkeypatch):
    image, sizes = pytest.importorskip("PIL.Image"), []
    file = split_folder(tmp_path)
    image.fromarray(noise(0, 60_000, 1, 3)).save(file)
    resize = image.Image.resize

    def watched(self, size, *given, **options):
        sizes.append(size)
        assert size[0] * size[1] < 1 << 20
        return resize(self, size, *given, **options)

    monkeypatch.setattr(image.Image, "resize", watched)
    assert load(f"folder:{tmp_path}:224").test.shape == (3, 224, 224)
    assert set(sizes) == {(224, 224)}


@pytest.mark.parametrize(("width", "height"), [(100, 80), (17, 300), (33, 32), (5, 7), (64, 64), (1, 9)])
def test_the_largest_central_square_is_resized(tmp_path, width, height):
    image = pytest.importorskip("PIL.Image")
    file = split_folder(tmp_path)
    pixels, side = picture(file, 3, width, height), min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    box = (left, top, left + side, top + side)
    expected = image.fromarray(pixels).resize((32, 32), image.Resampling.BILINEAR, box=box)
    found = load(f"folder:{tmp_path}:32").test.images[0].numpy().astype(int)
    assert abs(found - np.asarray(expected).transpose(2, 0, 1)).max() <= 1  # of 255


def png(width, height):
    """A PNG of one bit a pixel that says its size, and holds a single compressed block of zeros."""

    def chunk(kind, content):
        body = kind + content
        return len(content).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([1, 0, 0, 0, 0])
    rows = zlib.compress(bytes(height * (1 + -(-width // 8))) if width * height < 1 << 28 else bytes(9))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("width", "height", "message"),
    [(9000, 9000, "9000×9000 pixels, expected 67,108,864 at most"), (50_000, 50_000, "")],
)
def test_an_image_that_would_fill_the_memory_is_refused_unread(tmp_path, width, height, message):
    file = split_folder(tmp_path)
    file.write_bytes(png(width, height))
    with pytest.raises(DataError, match=f"{file} cannot be read as an image .*{message}"):
        load(f"folder:{tmp_path}")


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "EPS"])
def test_only_png_and_jpeg_reach_a_decoder(tmp_path, kind):
    image = pytest.importorskip("PIL.Image")
    file = split_folder(tmp_path)
    image.fromarray(noise(0, 8, 8, 3)).save(file, format=kind)
    with pytest.raises(DataError, match=f"{file} cannot be read as an image .neither PNG nor JPEG"):
        load(f"folder:{tmp_path}")


def special(path, kind):
    """Something at a path that is not a file with content."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mknod(path, stat.S_IFSOCK | 0o600)


@pytest.mark.parametrize("kind", ["fifo", "device", "loop", "folder", "socket"])
def test_what_is_no_file_is_refused_instead_of_waited_for(tmp_path, cifar10_records, fashion_files, kind):
    file = split_folder(tmp_path / "images")
    special(file, kind)
    with pytest.raises(DataError, match=f"{file} cannot be read as an image"):
        load(f"folder:{tmp_path / 'images'}")
    write_binary(tmp_path / "cifar-10-batches-bin", cifar10_records)
    special_file = tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin"
    special_file.unlink()
    special(special_file, kind)
    with pytest.raises(DataError, match=f"{special_file} (cannot be read|is missing)"):
        load("cifar10", tmp_path, download=False)
    if kind != "loop":  # which counts as missing
        for name, content in fashion_files.items():
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
        (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
        special(tmp_path / "t10k-labels-idx1-ubyte.gz", kind)
        with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte.gz cannot be read"):
            load("fashion-mnist", tmp_path, download=False)


def test_names_of_classes_and_images_may_be_any_bytes(tmp_path):
    for name in (b"caf\xe9", b"tea"):
        folder = os.path.join(os.fsencode(tmp_path), name)
        try:
            os.mkdir(folder)
        except OSError:
            pytest.skip("this file system takes UTF-8 names alone")
        for i in range(3):
            picture(tmp_path / "good.png", i, 8, 8)
            os.rename(os.fsencode(tmp_path / "good.png"), os.path.join(folder, b"\xff%d.png" % i))
    found = load(f"folder:{tmp_path}:8")
    assert [os.fsencode(name) for name in found.classes] == [b"caf\xe9", b"tea"]


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion-mnist"])
def test_without_downloading_the_error_has_the_command_that_downloads(tmp_path, monkeypatch, name):
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("a download was started"))
    monkeypatch.setattr(fashion_mnist, "SYSTEM", tmp_path / "no")
    with pytest.raises(DataError, match=f"data.load..{name}., .*{tmp_path.name}"):
        load(name, tmp_path, download=False)
