"""The commands about networks: evaluate, summarize, pack and export them."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from mirrorquant import data, models, packing
from mirrorquant._text import first_line, printable
from mirrorquant.cli.runs import TRUSTED, place, suggest
from mirrorquant.export import FORMATS
from mirrorquant.export import export as export_model
from mirrorquant.health import health
from mirrorquant.packing import PackedModel, PackError, kernels
from mirrorquant.summary import summary as summarize
from mirrorquant.train import Best, Config, ConfigError, build
from mirrorquant.train.evaluate import MANY_CLASSES, layers, score
from mirrorquant.train.objective import Objective
from mirrorquant.train.run_folder import BEST

PACKED = ".safetensors"
_Evaluated = tuple[nn.Module, data.Data, Objective, dict[str, Any], str]
_ENDINGS = {"onnx": ".onnx", "openvino": ".xml"}
_RUNTIMES = {".onnx": ("onnx", "OnnxModel"), ".xml": ("openvino", "OpenVinoModel")}


def add_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds them to the parser."""
    custom: dict[str, Any] = {"metavar": "MODULE:FUNCTION", "help": "builds the model of a packed file, if custom"}
    sub = command("eval", evaluate, "runs/NAME --split val")
    text = f"a run, or a *{PACKED}, *.onnx or *.xml file; {TRUSTED}"
    sub.add_argument("what", type=place, metavar="RUN-OR-FILE", help=text)
    sub.add_argument("--split", default="test", choices=["train", "val", "test"])
    text = "the data set, downloaded if missing; default: the one that the run or the file names, if present"
    sub.add_argument("--data", help=text)
    sub.add_argument("--data-root", type=place, help="the folder of the data sets; default: that of the run, or data/")
    sub.add_argument("--model", **custom)
    sub = command("summary", summary, "cifar10/vgg16/ref")
    sub.add_argument("what", type=place, metavar="RUN-OR-RECIPE-OR-FILE")
    sub = command("pack", pack, "runs/NAME -o net.safetensors")
    sub.add_argument("what", type=place, metavar="RUN", help=f"the run's folder, or its {BEST[0]}; {TRUSTED}")
    sub.add_argument("-o", "--out", type=place, metavar="FILE", help=f"default: RUN/packed{PACKED}")
    sub.set_defaults(model=None)
    sub = command("export", export, "runs/NAME --to onnx", json=False)
    sub.add_argument("what", type=place, metavar="RUN-OR-FILE", help="a run, or a packed file")
    sub.add_argument("--to", required=True, choices=FORMATS)
    sub.add_argument("-o", "--out", type=place, metavar="FILE", help="default: beside the source")
    sub.add_argument("--shape", type=_shape, help="of one input, as in 3x32x32; default: as the source says")
    sub.add_argument("--model", **custom)


def evaluate(options: argparse.Namespace) -> None:
    """Evaluate the best rounded network of a run, or a file made from it."""
    from_file = options.what.suffix in (PACKED, *_RUNTIMES)
    model, images, objective, result, text = _from_file(options) if from_file else _from_run(options)
    result |= {"split": options.split, "data": images.name}
    try:
        result |= score(model, getattr(images, options.split), images, objective)._asdict()
    except Exception as error:
        raise PackError(f"{options.what} cannot be tested on {images}: {first_line(error)}") from error
    for problem in getattr(getattr(images, options.split), "problems", ()):
        print(f"skipped: {problem}", file=sys.stderr)
    if options.json:
        print(json.dumps(result))
        return
    top5 = f", top-5 {result['top5']:.2f} %" * (len(images.classes) >= MANY_CLASSES)
    print(f"{images.name} {options.split}: {result['accuracy']:.2f} %{top5} (loss {result['loss']:.4f})\n{text}")


def _from_run(options: argparse.Namespace) -> _Evaluated:
    """The network of a run, its images and loss, and whether its weights are on their levels, as facts and as text."""
    best = _best(options)
    config, off, device = best.config, best.off_levels, build.device(best.config)
    images = _images(config.data, config.data_root, options)
    if len(images.classes) != best.images["classes"]:
        raise ConfigError(f"{best.path} has {best.images['classes']} classes, but {images.name} {len(images.classes)}")
    images = _as_trained(images, best.images, options).to(device)
    counts = {len(images.train), len(images.train) + len(images.val)}  # the latter with train_on=all
    if options.data is None and config.images not in {0, *counts}:
        told = f"the run began with {config.images} training images, but now there are {min(counts)}"
        print(f"warning: {told}: if they were split here, some of them may be tested", file=sys.stderr)
    problems = [] if off else health(best.opt).collapses
    count = sum(row["bits"] < 32 for row in layers(best.opt))
    every = f"all {count} quantized tensors are" if count > 1 else "the quantized tensor is"
    text = f"{every} exactly on {'their' if count > 1 else 'its'} {config.levels} levels"
    text = text if count else "a float network: none of its tensors is quantized"
    text = f"off their levels: {off}" if off else text
    text = "\n".join([text, *(f"warning: {problem}" for problem in problems)])
    facts = {"folder": str(options.what), "weights_off_their_levels": off, "problems": problems}
    return best.model.to(device), images, Objective(logit_scale=config.logit_scale), facts, text


def _from_file(options: argparse.Namespace) -> _Evaluated:
    """The network of a packed or exported file, its images and loss, and its size and runtime, as facts and as text."""
    path = options.what
    if path.suffix == PACKED:
        model: Any = _packed(options)
        how = f"packed: {kernels.describe()}" if model.runs else "in float32"
    else:
        _refuse_builder(options)
        module, name = _RUNTIMES[path.suffix]
        model = getattr(importlib.import_module(f"mirrorquant.export.{module}"), name)(path)
        how = f"by {model.runtime}"
    named = model.about.get("data")
    if options.data is None and (named not in data.names() or ":" in named):  # a stranger's file opens no folder
        raise ConfigError(f"{path} does not say which data it is for: pass --data, as in --data cifar10")
    size = sum(file.stat().st_size for file in _files_of(path))
    facts = {"file": str(path), "bytes": size}
    images = _as_trained(_images(named, Config.data_root, options), model.about, options)
    scale = model.about.get("logit_scale", 1.0)
    objective = Objective(logit_scale=float(scale) if isinstance(scale, int | float) else 1.0)
    return model, images, objective, facts, f"{size:,} bytes, run {how}"


def _as_trained(images: data.Data, about: Mapping[str, Any], options: argparse.Namespace) -> data.Data:
    """Images as a network has learnt to see them: its size if they are streamed, its normalisation, its classes."""
    try:
        if isinstance(images.train, data.Photos) and about.get("shape"):
            images = images.resized(int(about["shape"][1]))
        mean, std = (tuple(map(float, about.get(key, getattr(images, key)))) for key in ("mean", "std"))
        problem = printable(data.renamed(about.get("names", images.classes), images.classes))
        images = dataclasses.replace(images, mean=mean, std=std)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{options.what} cannot be tested on {images}: {first_line(error)}") from error
    if problem and options.data is None:
        raise ConfigError(
            f"{options.what} was trained on other classes: {problem}. Restore their names, or pass --data"
        )
    if problem:
        print(f"warning: {options.what} was trained on other classes: {problem}", file=sys.stderr)
    return images


def _images(named: str, root: str, options: argparse.Namespace) -> data.Data:
    """The data set that --data names, or else the run or the file, which may come from anybody: without a download."""
    root = options.data_root or root
    if options.data is not None:
        return data.load(options.data, root)
    try:
        return data.load(named, root, download=False)
    except data.DataError as error:
        raise data.DataError(f"{error} Or pass --data {named}: no run or file starts a download by itself.") from error


def pack(options: argparse.Namespace) -> None:
    """Write the best rounded network of a run at one bit per weight; a float network as it is."""
    model, about, source = _network(options)
    path = _output(options.out, source.with_suffix(PACKED))
    packing.save(model, path, about=about)
    contents = packing.read(path)
    size, full = contents.size, summarize(contents).float_bytes
    if options.json:
        print(json.dumps({"file": str(path), "bytes": size, "float_bytes": full}))
        return
    ratio = f", {full / size:.1f} times smaller than in float32 ({full:,})" if size < full else f"; {full:,} in float32"
    print(f"wrote {path}: {size:,} bytes{ratio}")
    file, images = shlex.quote(str(path)), _data_option(about)
    builder = f" --model {shlex.quote(str(about.get('model', 'MODULE:FUNCTION')))}" * (contents.architecture is None)
    look = (f"summary {file}", "its bits and bytes, layer by layer")
    check = (f"eval {file}{builder}{images}", "its accuracy, run packed")
    suggest(look, check, (f"export {file} --to onnx{builder}", ""))


def export(options: argparse.Namespace) -> None:
    """Write a network for another runtime, at one bit per weight."""
    model, about, source = _network(options)
    shape = options.shape or about.get("shape")
    if not isinstance(shape, list):
        raise PackError(f"{options.what} does not name its input shape: pass --shape, as in --shape 3x32x32")
    path = _output(options.out, source.with_suffix(_ENDINGS[options.to]))
    export_model(model, path, shape, to=options.to, about=about)
    for file in _files_of(path):
        print(f"wrote {file}: {file.stat().st_size:,} bytes")
    suggest((f"eval {shlex.quote(str(path))}{_data_option(about)}", "its accuracy in that runtime"))


def _files_of(path: Path) -> list[Path]:
    """The file itself, and for OpenVINO also the *.bin with the weights."""
    return [path, path.with_suffix(".bin")] if path.suffix == ".xml" else [path]


def _data_option(about: dict[str, Any]) -> str:
    """--data for a network whose file cannot name its data set: a custom folder, or none."""
    named = str(about.get("data", "NAME"))
    return "" if named in data.names() else f" --data {printable(shlex.quote(named))}"


def _output(given: Path | None, otherwise: Path) -> Path:
    """The file to write, whose ending says what it is."""
    if given is not None and given.suffix != otherwise.suffix:
        raise PackError(f"{given} must end in {otherwise.suffix}, by which its content is recognized")
    return given or otherwise


def summary(options: argparse.Namespace) -> None:
    """Show the bits and bytes of a network, layer by layer."""
    path, about, end = options.what, {}, ""
    if path.suffix == PACKED:
        contents = packing.read(path)
        found = summarize(contents)
        about = {"file": str(path), "bytes": found.bytes, "float_bytes": found.float_bytes}
        about |= {"sha256": contents.sha256, "architecture": contents.architecture, "about": contents.about}
        end = f"\nsha256 {contents.sha256}"
    elif path.exists():
        best = _best(options)  # whose optimizer knows the levels as long as it lives
        found = summarize(best.model, about=best.about)
    elif path.is_absolute() or path.suffix or path.parts[0] == "runs":
        raise ConfigError(f"{path} does not exist: name a run, a packed *{PACKED} file or a recipe")
    else:
        config = Config.from_recipe(str(path))
        known = data.get(config.data)
        model = build.model(config, known.classes or 10, known.shape[0] if known.shape else 3)
        found = summarize(build.optimizer(config, model, 1))
    rows = [vars(row) for row in found.rows]
    print(json.dumps({**about, "tensors": rows} if about else rows) if options.json else f"{found}{end}")


def _network(options: argparse.Namespace) -> tuple[nn.Module, dict[str, Any], Path]:
    """A packed file, or the best network of a run: its model, its origin, and the path of files made from it."""
    if options.what.suffix == PACKED:
        model = _packed(options)
        return model, model.about, options.what
    best = _best(options)
    return best.packed(), best.about, best.path.with_name("packed")


def _packed(options: argparse.Namespace) -> PackedModel:
    """A packed file, in the model that --model builds, if it is custom."""
    if options.model is None:
        return packing.load(options.what)
    classes: Any = packing.read(options.what).about.get("classes")
    known = type(classes) is int and 0 < classes < 1 << 20
    return packing.load(options.what, models.build(options.model, classes if known else 10))


def _best(options: argparse.Namespace) -> Best:
    """The best network of a run, from its folder or its file."""
    path: Path = options.what
    if path.is_file() and path.name not in BEST:
        expected = f"the folder of a run, its {BEST[0]} or a packed *{PACKED}"
        raise ConfigError(f"{path} is not a supported file; expected {expected}")
    _refuse_builder(options)
    return Best.load(path)


def _refuse_builder(options: argparse.Namespace) -> None:
    if vars(options).get("model"):
        raise ConfigError(f"--model is for packed files: {options.what} has its own")


def _shape(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"invalid shape {text}; use positive sizes such as 3x32x32")
    return [int(size) for size in text.split("x")]
