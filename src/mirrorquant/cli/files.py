"""The commands about networks: evaluate, summarize, pack and export them."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from mirrorquant import data, models, packing
from mirrorquant._text import first_line, printable
from mirrorquant.cli.train import TRUSTED, suggest
from mirrorquant.export import FORMATS
from mirrorquant.export import export as export_model
from mirrorquant.health import health
from mirrorquant.optimizer import MirrorDescent
from mirrorquant.packing import PackError, kernels
from mirrorquant.summary import summary as summarize
from mirrorquant.train import Best, Config, ConfigError, build
from mirrorquant.train.evaluate import accuracy, layers
from mirrorquant.train.run_folder import BEST

PACKED = ".safetensors"
_ENDINGS = {"onnx": ".onnx", "openvino": ".xml"}


def add_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds them to the parser."""
    custom: dict[str, Any] = {"metavar": "MODULE:FUNCTION", "help": "builds the model of a packed file, if custom"}
    sub = command("eval", evaluate, "runs/NAME --split val")
    text = f"a run, or a *{PACKED}, *.onnx or *.xml file; {TRUSTED}"
    sub.add_argument("what", type=_run, metavar="RUN-OR-FILE", help=text)
    sub.add_argument("--split", default="test", choices=["train", "val", "test"])
    text = "for a file: the data set, downloaded if missing; default: the one that the file names, if present"
    sub.add_argument("--data", help=text)
    sub.add_argument("--data-root", help="for a file: the folder of the data sets; default: data/")
    sub.add_argument("--model", **custom)
    sub = command("summary", summary, "cifar10/vgg16/ref")
    sub.add_argument("what", type=_run, metavar="RUN-OR-RECIPE-OR-FILE")
    sub = command("pack", pack, "runs/NAME -o net.safetensors")
    sub.add_argument("what", type=Path, metavar="RUN", help=f"the run's folder, or its {BEST[0]}; {TRUSTED}")
    sub.add_argument("-o", "--out", type=Path, metavar="FILE", help=f"default: RUN/packed{PACKED}")
    sub = command("export", export, "runs/NAME --to onnx", json=False)
    sub.add_argument("what", type=Path, metavar="RUN-OR-FILE", help="a run, or a packed file")
    sub.add_argument("--to", required=True, choices=FORMATS)
    sub.add_argument("-o", "--out", type=Path, metavar="FILE", help="default: beside the source")
    sub.add_argument("--shape", type=_shape, help="of one input, as in 3x32x32; default: as the source says")
    sub.add_argument("--model", **custom)


def evaluate(options: argparse.Namespace) -> None:
    """Evaluate the best rounded network of a run, or a file made from it."""
    from_file = options.what.suffix in (PACKED, *_ENDINGS.values())
    result, text = _evaluate_file(options.what, options) if from_file else _evaluate_run(options.what, options)
    if options.json:
        print(json.dumps(result))
        return
    print(f"{result['data']} {options.split}: {result['accuracy']:.2f} % (loss {result['loss']:.4f})\n{text}")


def _evaluate_run(folder: Path, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The result of a run, and a text that says whether its weights are on their levels."""
    _refuse_file(folder, f"the folder of a run, a packed *{PACKED}, an *.onnx or an OpenVINO *.xml file")
    if options.data or options.data_root or options.model:
        raise ConfigError("--data, --data-root and --model are for files: a run knows them")
    best = Best.load(folder)
    config, off, device = best.config, best.off_levels, build.device(best.config)
    images = data.load(config["data"], config["data_root"], download=False).to(device)
    if len(images.classes) != best.images["classes"]:
        raise ConfigError(f"{best.path} has {best.images['classes']} classes, but {images.name} {len(images.classes)}")
    result: dict[str, Any] = {"folder": str(folder), "split": options.split, "data": images.name}
    result["weights_off_their_levels"] = off
    result["problems"] = [] if off else health(best.opt).collapses
    result["accuracy"], result["loss"] = accuracy(best.model.to(device), getattr(images, options.split), images)
    count = sum(row["bits"] < 32 for row in layers(best.opt))
    text = f"all {count} quantized tensors are exactly on their {config['levels']} levels"
    text = text if count else "a float network: none of its tensors is quantized"
    text = f"off their levels: {off}" if off else text
    return result, "\n".join([text, *(f"warning: {problem}" for problem in result["problems"])])


def _evaluate_file(path: Path, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The result of a packed file, or of an exported one in its runtime; and a text with its size and that runtime."""
    if options.model and path.suffix != PACKED:
        raise ConfigError(f"--model is for packed files: {path} holds its own")
    network: Any
    if path.suffix == PACKED:
        network = _network(path, options.model)
        model, how = network.model, f"run packed: {kernels.describe()}"
    else:
        model = network = _runtime(path.suffix)(path)
        how = f"run by {network.runtime}"
    images = _data_of_file(path, network.about, options)
    size = sum(file.stat().st_size for file in _files_of(path))
    result: dict[str, Any] = {"file": str(path), "split": options.split, "data": images.name, "bytes": size}
    try:
        result["accuracy"], result["loss"] = accuracy(model, getattr(images, options.split), images)
    except Exception as error:
        shape = "x".join(map(str, images.shape))
        raise PackError(f"{path} cannot be tested on {images.name}, images of {shape}: {first_line(error)}") from error
    return result, f"{size:,} bytes, {how}"


def _runtime(ending: str) -> Any:
    """The class of models that a runtime runs."""
    if ending == ".onnx":
        return importlib.import_module("mirrorquant.export.onnx").OnnxModel
    return importlib.import_module("mirrorquant.export.openvino").OpenVinoModel


def _files_of(path: Path) -> list[Path]:
    """The file itself, and for OpenVINO also the *.bin with the weights."""
    return [path, path.with_suffix(".bin")] if path.suffix == ".xml" else [path]


def _data_of_file(path: Path, about: dict[str, Any], options: argparse.Namespace) -> data.Data:
    """The data set that --data names, or else the file, which may come from anybody: no folder, and no download."""
    root, named = options.data_root or Config.data_root, about.get("data")
    if options.data:
        return data.load(options.data, root)
    if not isinstance(named, str) or ":" in named or named not in data.names():
        raise ConfigError(f"{path} does not say which data it is for: pass --data, as in --data cifar10")
    try:
        return data.load(named, root, download=False)
    except data.DataError as error:
        raise data.DataError(f"{error} Or pass --data {named}: a file by itself never starts a download.") from error


def pack(options: argparse.Namespace) -> None:
    """Write the best rounded network of a run at one bit per weight."""
    network = _network(options.what)
    path = _output(options.out, network.folder / f"packed{PACKED}")
    packing.save(network.model, path, about=network.about)
    contents = packing.read(path)
    size, full = contents.size, summarize(contents).float_bytes
    if options.json:
        print(json.dumps({"file": str(path), "bytes": size, "float_bytes": full}))
        return
    print(f"wrote {path}: {size:,} bytes; in float32 {full:,}: {full / size:.1f} times as much")
    file, images = shlex.quote(str(path)), _data_option(network.about)
    model = f" --model {shlex.quote(str(network.about.get('model', 'MODULE:FUNCTION')))}"
    model *= contents.architecture is None
    look = (f"summary {file}", "its bits and bytes, layer by layer")
    suggest(look, (f"eval {file}{model}{images}", "its accuracy, run packed"), (f"export {file} --to onnx{model}", ""))


def export(options: argparse.Namespace) -> None:
    """Write a network for another runtime, at one bit per weight."""
    network = _network(options.what, options.model)
    shape = options.shape or network.about.get("shape")
    if not isinstance(shape, list) or not all(_whole(size, 0) for size in shape):
        raise PackError(f"{options.what} does not say what it takes: pass --shape, as in --shape 3x32x32")
    path = _output(options.out, network.folder / (network.name + _ENDINGS[options.to]))
    export_model(network.model, path, shape, to=options.to, about=network.about)
    for file in _files_of(path):
        print(f"wrote {file}: {file.stat().st_size:,} bytes")
    check = f"eval {shlex.quote(str(path))}{_data_option(network.about)}"
    suggest((check, f"its accuracy in {_runtime(path.suffix).runtime}"))


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
    path: Path = options.what
    if path.suffix == PACKED:
        contents = packing.read(path)
        found = summarize(contents)
        about: dict[str, Any] = {"file": str(path), "bytes": found.bytes, "float_bytes": found.float_bytes}
        about |= {"sha256": contents.sha256, "architecture": contents.architecture, "about": contents.about}
        text = f"{found}\nsha256 {contents.sha256}"
    else:
        found, about = summarize(Best.load(path).model if path.is_dir() else _untrained(path)), {}
        text = str(found)
    rows = [vars(row) for row in found.rows]
    print(json.dumps({**about, "tensors": rows} if about else rows) if options.json else text)


def _untrained(recipe: Path) -> MirrorDescent:
    """The network of a recipe, in its optimizer."""
    _refuse_file(recipe, f"the folder of a run, a recipe or a packed *{PACKED}")
    config = Config.from_recipe(str(recipe))
    known = data.get(config["data"])
    model = build.model(config, known.classes or 10, known.shape[0] if known.shape else 3)
    return build.optimizer(config, model, 1)


@dataclass(frozen=True)
class _Network:
    """A rounded network, where it comes from, and the folder and the name of files that are made from it."""

    model: nn.Module
    about: dict[str, Any]
    folder: Path
    name: str


def _network(path: Path, builder: str | None = None) -> _Network:
    """The best rounded network of a run (its folder, or the file of the network), or of a packed file."""
    if path.suffix == PACKED:
        contents = packing.read(path)
        if contents.architecture is None and builder is None:
            remedy = "pass one of the same structure, by --model MODULE:FUNCTION"
            raise PackError(f"{path} holds a model that is not of this library: {remedy}")
        own = None if builder is None else models.build(builder, _whole(contents.about.get("classes"), 10))
        return _Network(packing.load(path, own), contents.about, path.parent, path.stem)
    if builder is not None:
        raise ConfigError(f"--model is for packed files: {path} is a run, which knows its model")
    if path.name not in BEST:
        _refuse_file(path, f"the folder of a run, its {BEST[0]} or a packed *{PACKED}")
    best = Best.load(path)
    if best.config["method"] == "ref":
        call = f"torch.load({str(best.path)!r}, weights_only=True)['model'], a state_dict for PyTorch's tools"
        reason = "is a float network, and only quantized ones can be packed or exported"
        raise PackError(f"{path} {reason}; in Python its weights are {call}")
    if off := best.off_levels:
        raise PackError(f"{best.path} has weights off their {best.config['levels']} levels, in {', '.join(off)}")
    return _Network(best.model, best.about, best.path.parent, "packed")


def _refuse_file(path: Path, expected: str) -> None:
    if path.is_file():
        raise ConfigError(f"{path} is not a supported file; expected {expected}")


def _whole(value: Any, otherwise: int) -> int:
    return value if type(value) is int and 0 < value < 1 << 20 else otherwise


def _run(text: str) -> Path:
    """A path; the file of the best network of a run stands for the run."""
    path = Path(text)
    return path.parent if path.name in BEST else path


def _shape(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"invalid shape {text}; use positive sizes such as 3x32x32")
    return [int(size) for size in text.split("x")]
