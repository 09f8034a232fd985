"""Image files that are streamed from the disk, for data sets that do not fit in memory.

Worker processes read, decode, cut and resize the images of a batch and hand it over as bytes; it is normalised on the
device. A training batch is a function of its number alone, however many workers or processes share the work.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import glob
import hashlib
import itertools
import multiprocessing
import os
import re
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from mirrorquant import _files

from . import decoding
from .base import Data, DataError, check_labels
from .store import Store, key_of

AUGMENTATIONS = ("resized-crop-flip", "centre", "none")
Batch = tuple[Tensor | None, Tensor, dict[int, str]]  # images, labels, and what is wrong with files by their number
CPU = torch.device("cpu")
MAX_WORKERS, PREFETCH = 16, 2  # batches that each worker makes ahead
CORRUPT, CORRUPT_SHARE = 50, 0.01  # as many corrupt images are skipped, or this share of all, whichever is more ...
MOST_CORRUPT = 0.25  # ... but no more than this share
_NOT_ITS_FAULT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}  # errors that say nothing about a file
_NOT_ITS_FAULT |= {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENODEV}

_running = weakref.WeakSet[Iterator[Any]]()  # the streams of this process that may have workers


class Paths(Sequence[Path]):
    """Paths in one block of bytes: a million take 100 MB, and worker processes share them without a copy.

    >>> paths = Paths([Path("a/1.png"), Path("b/2.png"), Path("b/3.png")])
    >>> paths[-1].name, len(paths[:2]), len(paths.take(torch.tensor([2, 0])) + paths)
    ('3.png', 2, 5)
    """

    def __init__(self, paths: Iterable[str | Path] = ()) -> None:
        names = [os.fsencode(path) for path in paths]
        ends = torch.tensor([0, *itertools.accumulate(map(len, names))])
        self._bytes = torch.frombuffer(bytearray(b"".join(names) or b"\0"), dtype=torch.uint8)
        self._starts, self._ends = ends[:-1], ends[1:]

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> Paths: ...
    def __getitem__(self, index: int | slice) -> Path | Paths:
        if isinstance(index, slice):
            return self.take(index)
        start, end = int(self._starts[index]), int(self._ends[index])
        return Path(os.fsdecode(bytes(self._bytes[start:end].tolist())))

    def __add__(self, other: Paths) -> Paths:
        joined, shift = Paths(), len(self._bytes)
        joined._bytes = torch.cat([self._bytes, other._bytes])
        joined._starts = torch.cat([self._starts, other._starts + shift])
        joined._ends = torch.cat([self._ends, other._ends + shift])
        return joined

    def texts(self) -> Iterator[str]:
        """All paths as texts, faster than one by one."""
        content = ctypes.string_at(self._bytes.data_ptr(), len(self._bytes))
        for start, end in zip(self._starts.tolist(), self._ends.tolist(), strict=True):
            yield os.fsdecode(content[start:end])

    def take(self, index: slice | Tensor) -> Paths:
        """Some of the paths; the bytes are shared."""
        taken = Paths()
        places = places_of(index, len(self))
        taken._bytes, taken._starts, taken._ends = self._bytes, self._starts[places], self._ends[places]
        return taken


@dataclass(frozen=True, eq=False)
class Photos:
    """A split of image files, PNG or JPEG, each of its own size: `labels` is N of int64, indices into `classes`.

    Batches of them have images of size×size pixels and lie on the `device`; labels stay on the CPU. In a `store`, made
    by `cached`, the images are decoded already.

    >>> two = Photos((Path("cat.jpg"), Path("dog.png")), torch.tensor([0, 1]), ("cat", "dog"))
    >>> len(two), two.shape, two.resized(64).shape
    (2, (3, 224, 224), (3, 64, 64))
    """

    paths: Sequence[Path]
    labels: Tensor
    classes: tuple[str, ...]
    size: int = 224
    device: torch.device = CPU
    store: Store | None = field(default=None, repr=False)
    problems: list[str] = field(init=False, repr=False, default_factory=list)  # files that evaluation has skipped
    _streams: dict[object, DataLoader[Any]] = field(init=False, repr=False, default_factory=dict)  # for evaluation

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", self.paths if isinstance(self.paths, Paths) else Paths(self.paths))
        check_labels(self.labels, len(self.paths), len(self.classes))
        if not 1 <= self.size <= 1024:
            raise DataError(f"The image size {self.size} is out of range, expected 1 to 1024.")

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image in a batch."""
        return 3, self.size, self.size

    def to(self, device: torch.device | str) -> Photos:
        """The same files, with batches on another device."""
        return replace(self, device=torch.device(device))

    def close(self) -> None:
        """Ends the workers that are kept for evaluation; another evaluation starts new ones."""
        self._streams.clear()

    def take(self, index: slice | Tensor) -> Photos:
        """Some of the images."""
        places = places_of(index, len(self))
        store = self.store and self.store.take(places)
        return replace(self, paths=self._paths.take(places), labels=self.labels[places], store=store)

    def resized(self, size: int) -> Photos:
        """The same files, with images of another size in batches; a store, which is made for one size, is left."""
        return self if size == self.size else replace(self, size=size, store=None)

    def followed_by(self, other: Photos) -> Photos:
        """These images and then those of another split."""
        labels = torch.cat([self.labels, other.labels])
        return replace(self, paths=self._paths + other._paths, labels=labels, store=None)

    @property
    def _paths(self) -> Paths:
        assert isinstance(self.paths, Paths)
        return self.paths

    def evaluated(self, number: int) -> Tensor:
        """An image as evaluation sees it: the shorter side resized to 8/7 of the size, the centre cut out."""
        return decoding.centre(self.read(number), self.size)

    def augmented(self, number: int, uniform: Sequence[float]) -> Tensor:
        """A random box of an image, resized, and mirrored if the last of the random numbers is below 1/2."""
        box = self.read(number, lambda height, width: decoding.random_box(height, width, uniform))
        image = decoding.resized(box, self.size, self.size)
        return image.flip(1) if uniform[-1] < 0.5 else image

    def read(self, number: int, choose: Callable[[int, int], decoding.Box] | None = None) -> Tensor:
        """The pixels of a box in an image, or of all of it; a file that is not an image raises `DataError`."""
        if self.store is not None and self.store.has(number):
            return self.store.read(number, choose)
        path = self.paths[number]
        try:
            return decoding.decode(_files.read_regular(path), self.size, choose)
        except DataError:
            raise
        except Exception as error:  # decoders fail in many ways
            if isinstance(error, MemoryError) or getattr(error, "errno", None) in _NOT_ITS_FAULT:
                remedy = "the file may be in order: see to that, and start again"
                raise DataError(f"{path} could not be read ({str(error) or 'out of memory'}): {remedy}.") from error
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise Unreadable(f"{path} cannot be read as an image ({why}): replace it or move it away.") from error


class Unreadable(DataError):
    """A file that is not an image, or a damaged one."""


class StreamedLoader:
    """Training batches of image files, with the promises of `Loader`: `batch(k)` depends on k alone.

    Worker processes (`workers`; -1 is one per core, at most 16; 0 is none) make the next batches ahead while k grows by
    one at a time; another k starts again there. A process that shares the work with others gets the rows of its
    `part`, its rank and the number of processes: the batch as a whole is the same, also for any number of workers.

    A file that is not an image, or a damaged one, is named in `problems`, and the next image in the order of the epoch
    takes its place. Too many of them raise `DataError`: more than 50, or 1 % if that is more, or a quarter.
    """

    def __init__(
        self,
        data: Data,
        *,
        batch_size: int,
        seed: int,
        augment: str = "",
        part: tuple[int, int] = (0, 1),
        workers: int = -1,
    ) -> None:
        if not isinstance(data.train, Photos):
            raise ValueError(f"images of {data.name} are in memory, expected image files: use Loader")
        augment = checked(data, batch_size, augment, AUGMENTATIONS)
        self.data, self.batch_size = data, batch_size
        self.batches_per_epoch = len(data.train) // batch_size
        self.waited = 0.0  # seconds in all that `raw` has waited for workers
        self.problems: list[str] = []
        self._photos, self._workers = data.train, worker_count(workers)
        self._batches = _Batches(replace(data.train), batch_size, seed, augment, rows_of(part, batch_size))
        self._corrupt: set[int] = set()
        self._start, self._next = _CountFrom(0), -1
        self._loader: DataLoader[Any] | None = None
        self._stream: Iterator[Any] | None = None
        self._copies: list[torch.cuda.Event] = []  # of the last two batches to the GPU

    def batch(self, k: int) -> tuple[Tensor, Tensor]:
        """Batch number k, counted from 0 over all epochs: normalised float32 images and int64 labels, on the device."""
        images, labels = _on_device(self.data, self._photos.device, *self.raw(k))
        if images.is_cuda:
            self._copies = [*self._copies[-1:], torch.cuda.current_stream(images.device).record_event()]
        return images, labels

    def raw(self, k: int) -> tuple[Tensor, Tensor]:
        """Batch number k as bytes: N×3×size×size of uint8 in channels_last, and int64 labels.

        Both lie in the memory of the host; if the batches go to a GPU, the images are pinned. Workers write to the same
        memory again: a batch stays as it is until the second call after it, or until the numbers jump.
        """
        start, jumps = time.perf_counter(), k != self._next or self._stream is None
        for copy in self._copies if jumps else self._copies[:-1]:
            copy.synchronize()
        try:
            if jumps:
                self._stream = self._from(k)
            assert self._stream is not None
            images, labels, corrupt = _next_of(self._stream)
        except BaseException:  # also Ctrl-C, or a worker that died: what comes next is unknown
            self.close()
            raise
        self.waited += time.perf_counter() - start
        self._next = k + 1
        self.problems += [why for number, why in corrupt.items() if number not in self._corrupt]
        self._corrupt |= corrupt.keys()
        check_corrupt(self.problems, len(self._photos))
        return self._batches.buffers[k] if self._batches.buffers else images, labels

    def close(self) -> None:
        """Ends the workers; a further batch starts them again."""
        _end(self._stream)
        self._stream = self._loader = None
        self._next = -1

    def _from(self, k: int) -> Iterator[Any]:
        self._start.first = k
        if self._loader is None:
            batches, device = self._batches, self._photos.device
            if self._workers and batches.buffers is None:
                share = len(range(self.batch_size)[batches.rows])
                batches.buffers = _Buffers(PREFETCH * self._workers + 2, share, self._photos.size, device)
            self._loader = _stream(batches, self._start, self._workers, device if batches.buffers is None else CPU)
        return _started(self._loader)


def clean_batches(
    photos: Photos, data: Data, batch_size: int, workers: int = -1, part: tuple[int, int] = (0, 1)
) -> Iterator[tuple[Tensor, Tensor]]:
    """All images in order, normalised like `data` but not augmented, for evaluation; the last batch may be smaller.

    Of several processes each takes a `part`, its rank and the number of processes: every count-th image from the
    rank on. The workers wait for the next call; they end with `photos`. A file that is not an image is skipped and
    named in `photos.problems`; too many of them raise `DataError`.
    """
    rank, count = check_part(part)
    images, key = _EvalBatches(replace(photos), batch_size, rank, count), (batch_size, part, workers)
    stream = photos._streams.pop(key, None)  # nobody else may use it now
    if stream is None:
        stream = _stream(images, range(len(images)), min(worker_count(workers), len(images)), photos.device)
    batches = _started(stream)
    try:
        for _ in range(len(images)):
            pixels, labels, corrupt = _next_of(batches)
            photos.problems.extend(why for why in corrupt.values() if why not in photos.problems)
            check_corrupt(photos.problems, len(photos))
            if len(labels):
                yield _on_device(data, photos.device, pixels, labels)
        photos._streams[key] = stream
    except BaseException:  # also if the caller wants no more
        _end(batches)
        raise


def cached(data: Data, folder: Path, say: Callable[[str], None] = lambda line: None) -> Data:
    """The same data, with its images decoded once and kept in `folder`: few cores then feed a GPU, as none decodes.

    An image is kept as it is, or resized so that its shorter side is 8/7 of the size, which evaluation needs anyway:
    it does not notice the difference. In training, small boxes are a little blurred. There is one file per split. For
    ImageNet at 224×224 they take 350 GB: 256×341×3 bytes for each of 1.33 million images. So they belong on a fast
    local disk. Names, sizes and times of the image files are compared each time; if one has changed, or the file is
    damaged, it is made again. `say` gets lines about the progress.
    """
    made: dict[int, Photos] = {}
    stem = re.sub(r"[^\w.-]+", "-", data.name)
    for name, split in (("train", data.train), ("val", data.val), ("test", data.test)):
        if not isinstance(split, Photos):
            raise DataError(f"images of {data.name} are in memory already: only image files are cached")
        if id(split) not in made:
            made[id(split)] = _stored(split, folder / f"{stem}-{name}", say)
    return replace(data, train=made[id(data.train)], val=made[id(data.val)], test=made[id(data.test)])


def _stored(photos: Photos, stem: Path, say: Callable[[str], None]) -> Photos:
    """The same images with their store, which is made if there is none yet."""
    side = decoding.shorter(photos.size)
    key = key_of(photos._paths.texts(), side)  # in the name: a process that reads an older file can go on
    file = stem.with_name(f"{stem.name}-{side}-{key.hex()[:16]}.pixels")
    store = Store.opened(file, key, len(photos))
    if store is None:
        for older in sorted({*file.parent.glob(f"{glob.escape(stem.name)}-*.pixels")} - {file}):
            say(f"{older} is older or of another size: delete it if nothing else uses it.")
        chunks = _StoreChunks(replace(photos, store=None), side)
        workers = min(worker_count(-1, alone=True), len(chunks))
        stream = _started(_stream(chunks, range(len(chunks)), workers, CPU))
        made = (_next_of(stream) for _ in range(len(chunks)))
        store = Store.written(file, key, made, len(photos), say)
    return replace(photos, store=store)


def worker_count(workers: int, *, alone: bool = False) -> int:
    """The number of worker processes: -1 is one per core that this process may use, at most 16.

    The processes that torchrun has started on this machine share its cores, unless all others wait for this one.
    """
    if workers < -1:
        raise ValueError(f"workers is {workers}, expected -1 (one per core) or more")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = cores if alone else max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    return min(MAX_WORKERS, cores) if workers == -1 else workers


def places_of(index: slice | Tensor, count: int) -> Tensor:
    """The numbers of some of `count` images; unlike that of a tensor, the step of a slice may be negative."""
    return torch.tensor(range(count)[index]) if isinstance(index, slice) else torch.arange(count)[index.cpu()]


def checked(data: Data, batch_size: int, augment: str, known: Iterable[str]) -> str:
    """The augmentation, by default that of the data, if it is known and a batch has no more images than there are."""
    if not 1 <= batch_size <= len(data.train):
        raise ValueError(f"batch_size is {batch_size}, expected 1 to {len(data.train)}, the number of images")
    augment = augment or data.augment
    if augment not in known:
        raise ValueError(f"augment is {augment!r}, expected one of {', '.join(known)}")
    return augment


def check_part(part: tuple[int, int]) -> tuple[int, int]:
    """The rank and the number of processes, if they make sense."""
    if not 0 <= part[0] < part[1]:
        raise ValueError(f"part is {part}, expected a rank from 0 and a number of processes above it")
    return part


def rows_of(part: tuple[int, int], batch_size: int) -> slice:
    """The rows of a batch that are the share of one process: `part` is its rank and the number of processes.

    >>> rows_of((1, 4), 64)
    slice(16, 32, None)
    """
    rank, count = check_part(part)
    if batch_size % count:
        raise ValueError(f"batch_size is {batch_size}, expected a multiple of {count}, the number of processes")
    return slice(rank * batch_size // count, (rank + 1) * batch_size // count)


def check_corrupt(problems: Sequence[str], count: int) -> None:
    """Raises `DataError` if too many of `count` files are corrupt."""
    if len(problems) > _most_corrupt(count):
        raise too_many(problems, count)


def _most_corrupt(count: int) -> int:
    return min(max(CORRUPT, int(CORRUPT_SHARE * count)), int(MOST_CORRUPT * count))


def too_many(problems: Sequence[str], count: int) -> DataError:
    """The error that names the first of the corrupt files."""
    found = f"{len(problems)} or more of {count} image files cannot be read, expected {_most_corrupt(count)} at most"
    return DataError(f"{found}. The first: {problems[0]}")


def generator(*key: int) -> Generator:
    """A generator of random numbers that depend on `key` alone."""
    digest = hashlib.sha256(":".join(map(str, key)).encode()).digest()
    return Generator().manual_seed(int.from_bytes(digest[:4], "big"))


@dataclass
class _CountFrom:
    """The numbers from `first` on."""

    first: int

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self.first)


class _Buffers:
    """Memory for the images of all batches that are under way, shared with the workers and used again and again.

    Fresh memory for each batch would cost more time than its images: a page fault per 4 KiB in two processes, and for a
    GPU a copy to pinned memory. This memory is itself pinned if `device` is a GPU.
    """

    def __init__(self, count: int, images: int, size: int, device: torch.device) -> None:
        storage = torch.UntypedStorage._new_shared(count * images * size * size * 3)  # type: ignore[no-untyped-call]
        self.memory = torch.empty(0, dtype=torch.uint8).set_(storage).view(count, images, size, size, 3)
        if device.type == "cuda":
            cuda, place = torch.cuda.cudart(), self.memory.data_ptr()  # type: ignore[no-untyped-call]
            if int(cuda.cudaHostRegister(place, self.memory.numel(), 0)):
                problem = f"{self.memory.numel():,} bytes for batches of images cannot be pinned, so copies to the GPU"
                warnings.warn(f"{problem} do not overlap with training: use fewer workers.", stacklevel=2)
            else:
                weakref.finalize(self, cuda.cudaHostUnregister, place).atexit = False

    def __getitem__(self, k: int) -> Tensor:
        """The images of batch k, N×3×size×size in channels_last."""
        return self.memory[k % len(self.memory)].permute(0, 3, 1, 2)


@dataclass
class _Batches(Dataset[Any]):
    """Training batches by their number: the share of images and labels, and what is wrong with corrupt files.

    With `buffers`, a batch comes without its images, which are in its buffer.
    """

    photos: Photos
    batch_size: int
    seed: int
    augment: str
    rows: slice
    buffers: _Buffers | None = None
    _order: tuple[int, Tensor] = (-1, torch.empty(0))

    def __getitem__(self, k: int) -> Batch | DataError:
        epoch, place = divmod(k, len(self.photos) // self.batch_size)
        if self._order[0] != epoch:
            self._order = epoch, torch.randperm(len(self.photos), generator=generator(self.seed, epoch))
        uniform = torch.rand(
            self.batch_size, decoding.NUMBERS, generator=generator(self.seed, epoch, place), dtype=torch.float64
        )[self.rows]
        images = self.buffers[k] if self.buffers else _empty(len(uniform), self.photos.size)
        chosen, corrupt = [], dict[int, str]()
        first = place * self.batch_size + self.rows.start
        try:
            for row, numbers in enumerate(uniform.tolist()):
                chosen.append(self._fill(images[row], first + row, numbers, corrupt))
        except DataError as error:
            return error
        return None if self.buffers else images, self.photos.labels[torch.tensor(chosen)], corrupt

    def _fill(self, row: Tensor, position: int, uniform: list[float], corrupt: dict[int, str]) -> int:
        """Writes the first image from a position of the order on that can be read, and returns its number."""
        order, count = self._order[1], len(self.photos)
        for further in range(count):
            number = int(order[(position + further) % count])
            if number in corrupt:
                continue
            try:
                if self.augment == "resized-crop-flip":
                    row.copy_(self.photos.augmented(number, uniform).permute(2, 0, 1))
                else:
                    row.copy_(self.photos.evaluated(number).permute(2, 0, 1))
            except Unreadable as error:
                corrupt[number] = str(error)
                check_corrupt(list(corrupt.values()), count)
            else:
                return number
        raise too_many(list(corrupt.values()), count)


@dataclass
class _EvalBatches(Dataset[Any]):
    """Batches for evaluation by their number."""

    photos: Photos
    batch_size: int
    rank: int
    count: int

    def __len__(self) -> int:
        return -(-len(range(self.rank, len(self.photos), self.count)) // self.batch_size)

    def __getitem__(self, k: int) -> Batch | DataError:
        chosen = range(self.rank, len(self.photos), self.count)[k * self.batch_size : (k + 1) * self.batch_size]
        images, read, corrupt = _empty(len(chosen), self.photos.size), list[int](), dict[int, str]()
        try:
            for number in chosen:
                if self._fill(images[len(read)], number, corrupt):
                    read.append(number)
        except DataError as error:
            return error
        return images[: len(read)], self.photos.labels[torch.tensor(read, dtype=torch.int64)], corrupt

    def _fill(self, row: Tensor, number: int, corrupt: dict[int, str]) -> bool:
        """Writes an image, unless it cannot be read."""
        try:
            row.copy_(self.photos.evaluated(number).permute(2, 0, 1))
        except Unreadable as error:
            corrupt[number] = str(error)
        return number not in corrupt


@dataclass
class _StoreChunks(Dataset[Any]):
    """What a store keeps, by the number of a chunk: pixels, and the heights and widths of images (0 if unreadable)."""

    photos: Photos
    side: int
    count: int = 64

    def __len__(self) -> int:
        return -(-len(self.photos) // self.count)

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor] | DataError:
        pixels, sides = [torch.empty(0, dtype=torch.uint8)], []
        try:
            for number in range(len(self.photos))[k * self.count : (k + 1) * self.count]:
                try:
                    image = decoding.shrunk(self.photos.read(number), self.side)
                except Unreadable:
                    image = torch.empty(0, 0, 3, dtype=torch.uint8)
                pixels.append(image.flatten())
                sides.append(image.shape[:2])
        except DataError as error:
            return error
        return torch.cat(pixels), torch.tensor(sides)


def _stream(batches: Dataset[Any], order: Iterable[int], workers: int, device: torch.device) -> DataLoader[Any]:
    """Whole batches, made in worker processes in this order; the workers stay for the next time."""
    return DataLoader(
        batches,
        batch_size=None,
        sampler=order,
        num_workers=workers,
        prefetch_factor=PREFETCH if workers else None,
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
        worker_init_fn=_start_worker,
        generator=Generator(),  # not the global one, which belongs to the user
    )


def _start_worker(number: int) -> None:
    parent = multiprocessing.parent_process()
    orphan = parent is not None and os.getppid() != parent.pid and multiprocessing.get_start_method() == "fork"
    if orphan:  # the parent died just now, and torch would not notice any more
        os._exit(1)
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes; the main one ends the workers
        signal.signal(number, signal.SIG_IGN)


def _started(loader: DataLoader[Any]) -> Iterator[Any]:
    """A stream from its beginning; of workers that are kept, one may have died in the meantime.

    Torch would raise an exception in the middle of whatever runs when a worker dies; without its signal handler, the
    next batch does.
    """
    before = signal.getsignal(signal.SIGCHLD)
    try:
        stream = iter(loader)
    except Exception as error:
        raise _failed(error) from error
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, before)
    if loader.num_workers:
        _running.add(stream)
        atexit.unregister(_end_all)  # before torch, which waits five seconds for each worker that it has not ended
        atexit.register(_end_all)
    return stream


def _end_all() -> None:
    """Ends all workers with the program: they ignore the signal by which Python would end them."""
    for stream in list(_running):
        _end(stream)


def _next_of(stream: Iterator[Any]) -> Any:
    """The next item of a stream; what went wrong in making it is raised."""
    try:
        found = next(stream)
    except Exception as error:  # torch meets the death of a worker in many ways
        if hasattr(stream, "_shutdown_workers"):
            raise _failed(error) from error
        raise
    if isinstance(found, DataError):  # as a value: raised in a worker, it would come with the worker's traceback
        raise found
    return found


def _failed(error: Exception) -> DataError:
    remedy = "If the memory or /dev/shm is full, use fewer workers, smaller batches or docker's --shm-size."
    return DataError(f"A worker process that reads images failed ({error}). {remedy}")


def _end(stream: Iterator[Any] | None) -> None:
    """Ends the workers now; a traceback may hold on to the stream, whose dead worker torch would report for ever."""
    if stream is not None and hasattr(stream, "_shutdown_workers"):
        stream._shutdown_workers()


def _empty(count: int, size: int) -> Tensor:
    """Memory for a batch; a worker shares it with the main process, which saves a copy."""
    images = torch.empty(count, 3, size, size, dtype=torch.uint8, memory_format=torch.channels_last)
    if get_worker_info() is not None:
        images.share_memory_()  # type: ignore[no-untyped-call]
    return images


def _on_device(data: Data, device: torch.device, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return data.normalise(images.to(device, non_blocking=True)), labels.to(device, non_blocking=True)
