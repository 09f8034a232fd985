"""The command line: train, evaluate, compare and look.

    mirrorquant train                                             a binary network on handwritten digits, in seconds
    mirrorquant train cifar10/resnet18/binary/md-tanh-s           a cell of the paper's tables
    mirrorquant train cifar10/resnet18/binary/bc lr=0.01 seed=1   the same with something changed
    mirrorquant train --resume runs/NAME                          go on where a run stopped
    mirrorquant compare --seeds 3                                 float, BinaryConnect and MD-tanh-S side by side
    mirrorquant eval runs/NAME                                    the best rounded network of a run, on the test set
    mirrorquant recipes cifar10/resnet18                          what there is, and with which hyperparameters
    mirrorquant pack runs/NAME                                    that network at one bit a weight, in a file
    mirrorquant export runs/NAME --to onnx                        the same for other runtimes

Exit codes: 0 done; 1 a problem that the message explains; 2 wrong usage; 130 and 143 interrupted, with a checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import io
import json
import re
import shlex
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from mirrorquant import methods, models, packing
from mirrorquant._text import first_line, printable
from mirrorquant._version import __version__
from mirrorquant.data import Data, DataError, load
from mirrorquant.data import get as get_data
from mirrorquant.data import names as data_names
from mirrorquant.errors import MirrorquantError
from mirrorquant.export import FORMATS
from mirrorquant.export import export as export_model
from mirrorquant.health import health
from mirrorquant.packing import PackError, kernels
from mirrorquant.report import RunRecord, labels, plots, read_results
from mirrorquant.report.tables import compare_row, compare_table, results_tables
from mirrorquant.train import Best, Config, ConfigError, Interrupted, Run, RunFolder, build, recipes
from mirrorquant.train.config import KEYS, Key, MachineKeys
from mirrorquant.train.evaluate import accuracy, layers
from mirrorquant.train.run_folder import BEST

__all__ = ["main"]

PACKED = ".safetensors"
DEFAULT = "digits/digitsnet/binary/md-tanh-s"
TRUSTED = "a run of a custom model imports the module it names, so only use runs you trust"
_CHANGEABLE = ("train", "compare")  # take key=value


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; a problem is reported in one line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows β as ?
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # precision=float32 means it
    parser, commands = _parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and not given[0].startswith("-") and given[0] not in commands:
        near = difflib.get_close_matches(given[0], commands, 1, cutoff=0.0)
        print(f"mirrorquant: there is no command {given[0]!r}; did you mean {near[0]!r}?", file=sys.stderr)
        return 2
    changes, rest = _changes(given)
    options, unknown = parser.parse_known_args(rest)
    if unknown:
        hint = _hint(unknown) if given[0] in _CHANGEABLE else ""
        if not hint:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        print(f"mirrorquant: {hint}", file=sys.stderr)
        return 2
    if not hasattr(options, "run"):
        parser.print_help()
        return 2
    options.overrides = changes
    if "" not in sys.path:
        sys.path.append("")  # for the user's own models, in the current folder
    try:
        options.run(options)
    except Interrupted as stop:
        print(f"mirrorquant: {stop}", file=sys.stderr)
        return 128 + stop.number
    except KeyboardInterrupt:
        print("mirrorquant: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
    except MirrorquantError as error:
        print(f"mirrorquant: {printable(str(error))}", file=sys.stderr)  # it may quote a stranger's file
        return 1
    except OSError as error:
        place = error.filename or "the output"
        print(f"mirrorquant: {place} cannot be read or written ({error.strerror})", file=sys.stderr)
        return 1
    except MemoryError:
        print("mirrorquant: there is not enough memory for this", file=sys.stderr)
        return 1
    return 0


def _changes(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """The key=value arguments, and the others; the value of an option is never a change, as in --out lr=0.1."""
    if not given or given[0] not in _CHANGEABLE:
        return [], list(given)
    valued = {"--out", "--results", "--methods", "--levels", "--seeds"} | (
        {"--resume"} if given[0] == "train" else set()
    )
    found = [
        bool(re.match(r"[A-Za-z_][\w-]*=", text)) and before not in valued
        for before, text in zip(["", *given], given, strict=False)
    ]
    pairs = list(zip(given, found, strict=True))
    return [text for text, change in pairs if change], [text for text, change in pairs if not change]


def _hint(unknown: Sequence[str]) -> str:
    """What to write instead of arguments that look like a change of a key; empty for others."""
    if "=" in unknown or any(text.startswith("=") for text in unknown):
        return "write key=value without spaces, as in lr=0.01"
    for text in unknown:
        key, _, value = text.lstrip("-").partition("=")
        if text.startswith("-") and key.replace("-", "_") in KEYS:
            return f"there is no option {text.partition('=')[0]}: write {key.replace('-', '_')}={value or 'VALUE'}"
    return ""


# Commands.


def train(options: argparse.Namespace) -> None:
    """Trains a recipe, or goes on with a run."""
    _try_writing(options.results)
    if options.resume:
        if options.recipe or options.out:
            raise ConfigError("--resume continues a run in its folder: recipe and --out cannot be given with it")
        run = Run.resume(options.resume, options.overrides, quiet=options.quiet)
    else:
        config = Config.from_recipe(options.recipe or DEFAULT, options.overrides)
        _refuse_idle([config])
        run = Run(config, options.out or _folder(config), quiet=options.quiet)
    summary = run.train()
    record = RunRecord.of(summary)
    if options.results:
        record.write_result(options.results)
    if options.json:
        print(json.dumps(summary))
        return
    _print_table([compare_row(record)])
    for path in _pictures([run.folder.path]):
        print(f"wrote {path}")
    best = "the best network" if run.config["method"] == "ref" else "the best rounded network"
    print(f"wrote {run.folder.path / BEST[0]}, {best}\n\nnext:")
    folder = shlex.quote(str(run.folder.path))
    really = "" if run.config["method"] == "ref" else ", and whether its weights really are on their levels"
    print(f"  mirrorquant eval {folder}          its accuracy{really}")
    print(f"  mirrorquant summary {folder}       its bits and bytes, layer by layer")
    if run.config["method"] != "ref":
        print(f"  mirrorquant pack {folder}          the network at its true size, in a file")


def compare(options: argparse.Namespace) -> None:
    """Trains several methods on one task."""
    _try_writing(options.results)
    if any(text.startswith("seed=") for text in options.overrides):
        raise ConfigError("compare trains with seeds 0, 1, ...: set how many with --seeds, instead of seed=")
    folder = options.out or Path("runs") / ("compare-" + options.task.replace("/", "-"))
    rows, folders = [], []
    chosen = [method.strip() for method in options.methods.split(",") if method.strip()]
    if not chosen:
        raise ConfigError("--methods is empty: name at least one, as in --methods bc,md-tanh-s")
    if twice := [method for method in chosen if chosen.count(method) > 1]:
        raise ConfigError(f"--methods names {twice[0]} twice")
    configs = [(method, seed, _compared(options, method, seed)) for method in chosen for seed in range(options.seeds)]
    _refuse_idle([config for _, _, config in configs])
    for method, seed, config in configs:
        run = _begun(config, folder / f"{method}-seed{seed}", options)
        record = RunRecord.of(run.train())
        if options.results:
            record.write_result(options.results)
        rows.append(compare_row(record))
        folders.append(run.folder.path)
    if options.json:
        print(json.dumps(rows))
        return
    _print_table(rows)
    pictures = _pictures(folders, rows, folder)
    for path in pictures:
        if path.parent == folder:
            print(f"wrote {path}")
    weights = ", with a weights.png each" if any(path.parent != folder for path in pictures) else ""
    print(f"wrote {len(folders)} runs to folders in {folder}{weights}\n\nnext:")
    print("  mirrorquant train cifar10/resnet18/binary/md-tanh-s     a cell of the paper (needs a GPU and CIFAR-10)")
    print("  mirrorquant recipes                                     all of them")
    print("  mirrorquant train DATA/MODEL/... model=mymodule:myfunction data=folder:PATH     your own model and images")


def _refuse_idle(configs: Sequence[Config]) -> None:
    """Refuses overrides that change nothing in any of the runs."""
    idle = [config.idle_overrides() for config in configs]
    told = [f"{key} has no effect here because {why}" for key, why in idle[0].items() if all(key in i for i in idle)]
    if told:
        raise ConfigError(f"{', and '.join(told)}: leave it out")


def _compared(options: argparse.Namespace, method: str, seed: int) -> Config:
    """One run of a comparison; made for all of them before the first one trains."""
    name = f"{options.task}/ref" if method == "ref" else f"{options.task}/{options.levels}/{method}"
    if name not in recipes.names():
        raise recipes.RecipeError(_no_recipe(options.task, options.levels, method))
    return Config.from_recipe(name, [*options.overrides, f"seed={seed}"])


def _no_recipe(task: str, levels: str, method: str) -> str:
    """Why a method cannot be compared: its task is unknown, or has no hyperparameters for it; and what there is."""
    every = recipes.names()
    tasks = sorted({"/".join(name.split("/")[:2]) for name in every})
    if task not in tasks:
        near = difflib.get_close_matches(task, tasks, 1, cutoff=0.0)
        return f"there are no recipes for {task!r}; did you mean {near[0]!r}?"
    known = [name.split("/")[-1] for name in every if name == f"{task}/ref" or name.startswith(f"{task}/{levels}/")]
    there = f"{task} has no {levels} recipe for {method!r}, only for {', '.join(known)}"
    if method not in methods.list():
        near = difflib.get_close_matches(method, known, 1)
        return there + (f"; did you mean {near[0]!r}?" if near else "")
    base = next((name for name in reversed(every) if name.startswith(f"{task}/{levels}/")), f"{task}/ref")
    return f"{there}; to try it with another recipe's hyperparameters: mirrorquant train {base} method={method}"


def _begun(config: Config, folder: Path, options: argparse.Namespace) -> Run:
    """A run of a comparison: a new one, or with --resume the one that stands in its folder, ended or not."""
    if not options.resume or not RunFolder(folder).begun:
        return Run(config, folder, quiet=options.quiet)
    if RunFolder(folder).config().identity != build.resolve(config).identity:
        raise ConfigError(f"{folder} holds a run of another configuration: give the same key=value, or another --out")
    return Run.resume(folder, quiet=options.quiet)


def evaluate(options: argparse.Namespace) -> None:
    """Evaluates the best rounded network of a run, or what was made from it."""
    if options.folder.suffix in (PACKED, ".onnx", ".xml"):
        return _evaluate_file(options)
    _refuse_file(options.folder, "the folder of a run, a packed *.safetensors, an *.onnx or an OpenVINO *.xml file")
    if options.data or options.data_root or options.model:
        raise ConfigError("--data, --data-root and --model are for files: a run knows them")
    best = Best.load(options.folder)
    config, off, device = best.config, best.off_levels, build.device(best.config)
    data = load(config["data"], config["data_root"], download=False).to(device)
    if len(data.classes) != best.images["classes"]:
        raise ConfigError(f"{best.path} has {best.images['classes']} classes, but {data.name} has {len(data.classes)}")
    result = {"folder": str(options.folder), "split": options.split, "weights_off_their_levels": off}
    result["problems"] = [] if off else health(best.opt).collapses
    result["accuracy"], result["loss"] = accuracy(best.model.to(device), getattr(data, options.split), data)
    if options.json:
        print(json.dumps(result))
        return
    print(f"{data.name} {options.split}: {result['accuracy']:.2f} % (loss {result['loss']:.4f})")
    count = sum(row["bits"] < 32 for row in layers(best.opt))
    if off:
        print(f"off their levels: {off}")
    elif count:
        print(f"all {count} quantized tensors are exactly on their {config['levels']} levels")
    else:
        print("a float network: none of its tensors is quantized")
    for problem in result["problems"]:
        print(f"warning: {problem}")


def _evaluate_file(options: argparse.Namespace) -> None:
    """Evaluates a packed file, an ONNX file in ONNX Runtime, or OpenVINO IR in OpenVINO."""
    path = options.folder
    if options.model and path.suffix != PACKED:
        raise ConfigError(f"--model is for packed files: {path} holds its own")
    model, about, how = _runnable(path, options.model)
    data = _data_of_file(path, about, options)
    size = sum(file.stat().st_size for file in _files_of(path))
    result: dict[str, Any] = {"file": str(path), "split": options.split, "bytes": size}
    try:
        result["accuracy"], result["loss"] = accuracy(model, getattr(data, options.split), data)
    except Exception as error:
        shape = "x".join(map(str, data.shape))
        raise PackError(f"{path} cannot be tested on {data.name}, images of {shape}: {first_line(error)}") from error
    if options.json:
        print(json.dumps(result))
        return
    print(f"{data.name} {options.split}: {result['accuracy']:.2f} % (loss {result['loss']:.4f})")
    print(f"{size:,} bytes, {how}")


def _runnable(path: Path, builder: str | None) -> tuple[nn.Module, dict[str, Any], str]:
    """The network of a file, what the file says about it, and what runs it."""
    if path.suffix == PACKED:
        packed = _network(path, builder)
        return packed.model, packed.about, f"run packed: {kernels.describe()}"
    if path.suffix == ".onnx":
        from mirrorquant.export.onnx import OnnxModel

        onnx = OnnxModel(path)
        return onnx, onnx.about, "run by ONNX Runtime"
    from mirrorquant.export.openvino import OpenVinoModel

    openvino = OpenVinoModel(path)
    return openvino, openvino.about, "run by OpenVINO in float32"


def _files_of(path: Path) -> list[Path]:
    """The file itself, and for OpenVINO also the *.bin with the weights."""
    return [path, path.with_suffix(".bin")] if path.suffix == ".xml" else [path]


def _data_of_file(path: Path, about: dict[str, Any], options: argparse.Namespace) -> Data:
    """The data set that --data names, or else the file.

    A file may come from anybody: it can name a data set of this library, but not a folder, and starts no download.
    """
    root, told = options.data_root or MachineKeys.data_root, about.get("data")
    if options.data:
        return load(options.data, root)
    if not isinstance(told, str) or ":" in told or told not in data_names():
        raise ConfigError(f"{path} does not say which data it is for: pass --data, as in --data cifar10")
    try:
        return load(told, root, download=False)
    except DataError as error:
        raise DataError(f"{error} Or pass --data {told}: a file by itself never starts a download.") from error


def pack(options: argparse.Namespace) -> None:
    """Writes the best rounded network of a run at one bit a weight."""
    network = _network(options.what)
    path = _output(options.out, network.folder / f"packed{PACKED}")
    packing.save(network.model, path, about=network.about)
    contents = packing.read(path)
    if options.json:
        print(json.dumps({"file": str(path), "bytes": contents.size, "float_bytes": _float_bytes(contents)}))
        return
    full = _float_bytes(contents)
    print(
        f"wrote {path}: {contents.size:,} bytes; in float32 {full:,}: {full / contents.size:.1f} times as much\n\nnext:"
    )
    file, own, name = shlex.quote(str(path)), contents.architecture is None, str(network.about.get("data", "NAME"))
    model = f" --model {shlex.quote(str(network.about.get('model', 'MODULE:FUNCTION')))}" if own else ""
    data = f" --data {shlex.quote(name)}" if ":" in name else ""  # a folder is not taken from a file unasked
    print(f"  mirrorquant summary {file}       its bits and bytes, layer by layer")
    print(f"  mirrorquant eval {file}{model}{data}          its accuracy, run packed")
    print(f"  mirrorquant export {file} --to onnx{model}")


def export(options: argparse.Namespace) -> None:
    """Writes a network for another runtime."""
    network = _network(options.what, options.model)
    shape = options.shape or network.about.get("shape")
    if not isinstance(shape, list) or not all(_whole(size, 0) for size in shape):
        raise PackError(f"{options.what} does not say what it takes: pass --shape, as in --shape 3x32x32")
    path = _output(options.out, network.folder / (network.name + {"onnx": ".onnx", "openvino": ".xml"}[options.to]))
    export_model(network.model, path, shape, to=options.to, about=network.about)
    for file in _files_of(path):
        print(f"wrote {file}: {file.stat().st_size:,} bytes")
    told, runtime = str(network.about.get("data", "NAME")), {"onnx": "ONNX Runtime", "openvino": "OpenVINO"}[options.to]
    data = "" if told in data_names() else f" --data {printable(shlex.quote(told))}"
    print(f"\nnext:\n  mirrorquant eval {shlex.quote(str(path))}{data}          in {runtime}")


def _output(told: Path | None, otherwise: Path) -> Path:
    """The file to write, whose ending says what it is."""
    if told is not None and told.suffix != otherwise.suffix:
        raise PackError(f"{told} must end in {otherwise.suffix}, by which what is in it is recognized")
    return told or otherwise


def show_kernels(options: argparse.Namespace) -> None:
    """Says which kernels run packed networks here."""
    print(kernels.describe())


def _float_bytes(contents: packing.Contents) -> int:
    """What the same tensors take in float32 (and in whatever is no float)."""
    return sum(row["float_bytes"] for row in contents.rows())


def _summary_of_file(options: argparse.Namespace) -> None:
    contents = packing.read(options.what)
    rows, full = contents.rows(), _float_bytes(contents)
    if options.json:
        told = {"file": str(options.what), "bytes": contents.size, "float_bytes": full, "sha256": contents.sha256}
        print(json.dumps({**told, "architecture": contents.architecture, "about": contents.about, "tensors": rows}))
        return
    print(f"{'tensor':36}{'shape':>20}{'levels':>16}{'bits':>6}{'bytes':>12}{'float32':>12}")
    for row in rows:
        levels = labels.levels(row["levels"]) if row["levels"] else "-"
        shape = "x".join(map(str, row["shape"])) or "1"
        name = printable(row["name"])
        print(f"{name:36}{shape:>20}{levels:>16}{row['bits']:6}{row['bytes']:12,}{row['float_bytes']:12,}")
    tensors = sum(row["bytes"] for row in rows)
    print(f"tensors {tensors:,} bytes, header {contents.size - tensors:,}: {contents.size:,} bytes on disk")
    print(f"in float32 {full:,} bytes: {full / contents.size:.1f} times as much")
    print(f"sha256 {contents.sha256}")


def show_recipes(options: argparse.Namespace) -> None:
    """Lists recipes, or shows one."""
    if options.name in recipes.names():
        recipe = recipes.get(options.name)
        if options.json:
            print(json.dumps(recipe))
        else:
            _print_columns(recipe)
        return
    found = [name for name in recipes.names() if not options.name or options.name in name]
    if not found:
        recipes.get(options.name)  # raises, with the nearest name
    if options.json:
        print(json.dumps(found))
        return
    for name in found:
        paper = recipes.get(name).get("paper")
        print(f"{name:48}" + (f"paper {paper:.2f} %" if paper else ""))


def show_methods(options: argparse.Namespace) -> None:
    """Lists the methods."""
    if options.json:
        print(json.dumps(methods.list()))
        return
    _print_columns(methods.list())


def summary(options: argparse.Namespace) -> None:
    """Counts per bit width, memory, and the float equivalent, of a run, a recipe or a packed file."""
    if options.what.suffix == PACKED:
        return _summary_of_file(options)
    if options.what.is_dir():
        rows = RunRecord.read(options.what / "summary.json").layers()
    else:
        _refuse_file(options.what, "the folder of a run, a recipe or a packed *.safetensors")
        config = Config.from_recipe(str(options.what))
        known = get_data(config["data"])
        classes, channels = known.classes or 10, known.shape[0] if known.shape else 3
        rows = layers(build.optimizer(config, build.model(config, classes, channels), 1))
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'parameter':36}{'shape':>20}{'count':>12}{'bits':>6}{'bytes':>12}")
    for row in rows:
        name, shape = printable(row["name"]), "x".join(map(str, row["shape"]))
        size = -(-row["count"] * row["bits"] // 8)
        print(f"{name:36}{shape:>20}{row['count']:12,}{row['bits']:6}{size:12,}")
    for bits in sorted({row["bits"] for row in rows}):
        print(f"{bits:3} bit: {sum(row['count'] for row in rows if row['bits'] == bits):12,} parameters")
    small, full = sum(row["count"] * row["bits"] for row in rows) / 8, sum(row["count"] * 4 for row in rows)
    print(f"in all {small:,.0f} bytes of weights; in float32 {full:,.0f}: {full / small:.1f} times as much")


def table(options: argparse.Namespace) -> None:
    """Prints the runs that were kept as results, a table per task."""
    print(results_tables(read_results(options.results)))


def curves(options: argparse.Namespace) -> None:
    """Draws training curves."""
    for folder in options.folders:
        if not folder.is_file():
            Config.load(folder / "config.json")
    print(f"wrote {plots.curves(options.folders, options.out)}")


def draw_projections(options: argparse.Namespace) -> None:
    """Draws projections, inverses and mirror maps."""
    for path in plots.projections(options.out):
        print(f"wrote {path}")


# What they share.


def _folder(config: Config) -> Path:
    """runs/NAME-seedK, numbered where it is taken."""
    base = Path("runs") / f"{config['recipe'].replace('/', '-')}-seed{config['seed']}"
    folder, number = base, 1
    while (folder / "config.json").exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


def _try_writing(results: Path | None) -> None:
    """Makes the folder of the results and a file in it: better an error now than after hours of training."""
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=results):
            pass


@dataclasses.dataclass(frozen=True)
class _Network:
    """A rounded network and where it comes from: what a file tells about itself."""

    model: nn.Module
    about: dict[str, Any]
    folder: Path
    name: str


def _network(path: Path, builder: str | None = None) -> _Network:
    """The best rounded network of a run (its folder, or its best.pt), or of a packed file."""
    if path.suffix == PACKED:
        contents = packing.read(path)
        if contents.architecture is None and builder is None:
            raise PackError(
                f"{path} holds a model that is not of this library: pass one of the same structure, by --model "
                "MODULE:FUNCTION"
            )
        own = None if builder is None else models.build(builder, _whole(contents.about.get("classes"), 10))
        return _Network(packing.load(path, own), contents.about, path.parent, path.stem)
    if builder is not None:
        raise ConfigError(f"--model is for packed files: {path} is a run, which knows its model")
    if path.name not in BEST:
        _refuse_file(path, f"the folder of a run, its {BEST[0]} or a packed *.safetensors")
    best = Best.load(path)
    if best.config["method"] == "ref":
        raise PackError(
            f"{path} is a float network, and only quantized ones can be packed or exported; in Python its weights are "
            f"torch.load({str(best.path)!r}, weights_only=True)['model'], a state_dict for PyTorch's tools"
        )
    if best.off_levels:
        raise PackError(
            f"{best.path} has weights off their {best.config['levels']} levels, in {', '.join(best.off_levels)}"
        )
    return _Network(best.model, best.about, best.path.parent, "packed")


def _refuse_file(path: Path, expected: str) -> None:
    if path.is_file():
        raise ConfigError(f"{path} is not a supported file; expected {expected}")


def _whole(value: Any, otherwise: int) -> int:
    return value if type(value) is int and 0 < value < 1 << 20 else otherwise


def _print_columns(values: dict[str, Any]) -> None:
    width = max(map(len, values))
    print("\n".join(f"{key:{width}} {value}" for key, value in values.items()))


def _print_table(rows: list[dict[str, Any]]) -> None:
    print("\n" + compare_table(rows) + "\n")


def _pictures(folders: list[Path], rows: list[dict[str, Any]] | None = None, out: Path | None = None) -> list[Path]:
    """The curves, the histograms, and the methods side by side; a hint where matplotlib is missing."""
    out = out or folders[0]
    paths = []
    try:
        paths.append(plots.curves(folders, out / "curves.png"))
        if rows and any(row["method"] != "ref" for row in rows):
            paths.append(plots.comparison(rows, out / "comparison.png"))
        paths += [plots.histograms(f, f / "weights.png") for f in folders if _has_histograms(f)]
    except plots.PlotError as error:
        print(f"{'not all' if paths else 'no'} pictures: {error}")
    return paths


def _has_histograms(folder: Path) -> bool:
    return bool(RunFolder(folder).config()["histogram_every"])


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("mirrorquant", description=__doc__, formatter_class=formatter)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")

    def command(name: str, run: Any, text: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=f"{text}\n\n    {example}", formatter_class=formatter)
        sub.set_defaults(run=run)
        return sub

    sub = command("train", train, "train a network", "mirrorquant train cifar10/resnet18/binary/md-tanh-s seed=1")
    sub.add_argument("recipe", nargs="?", help=f"a name from 'mirrorquant recipes'; default: {DEFAULT}")
    sub.add_argument("--out", type=Path, help="the run's folder; default: a new one in runs/")
    sub.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help=f"continue the run in this folder, perhaps with another device or data_root; {TRUSTED}",
    )
    _common(sub)
    sub = command("compare", compare, "several methods on one task", "mirrorquant compare digits/digitsnet --seeds 3")
    sub.add_argument("task", nargs="?", default="digits/digitsnet", help="data set and model of the recipes")
    sub.add_argument("--methods", default="ref,bc,md-tanh-s", help="names of recipes, separated by commas")
    sub.add_argument("--levels", default="binary", choices=["binary", "ternary"])
    sub.add_argument("--seeds", type=_count, default=1, help="runs per method, with seeds 0, 1, ...")
    sub.add_argument("--out", type=Path, help="folder of the runs; default: runs/compare-TASK")
    sub.add_argument("--resume", action="store_true", help="continue the comparison in the folder")
    _common(sub)
    sub = command("eval", evaluate, "the best rounded network of a run", "mirrorquant eval runs/NAME --split val")
    sub.add_argument(
        "folder", type=_run, metavar="RUN-OR-FILE", help=f"a run, or a *{PACKED}, *.onnx or *.xml file; {TRUSTED}"
    )
    sub.add_argument("--split", default="test", choices=["train", "val", "test"])
    sub.add_argument(
        "--data",
        help="for a file: the data set, downloaded if missing; default: the one that the file names, if present",
    )
    sub.add_argument("--data-root", help="for a file: where data sets are; default: data/")
    sub.add_argument(
        "--model", metavar="MODULE:FUNCTION", help="for a packed file: what builds the model, if it is yours"
    )
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub = command("recipes", show_recipes, "list recipes, or show one", "mirrorquant recipes cifar10/resnet18/ref")
    sub.add_argument("name", nargs="?", default="", help="a recipe, or a part of the names to list")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub = command("methods", show_methods, "list the methods", "mirrorquant methods")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub = command("summary", summary, "bits and bytes, layer by layer", "mirrorquant summary cifar10/vgg16/ref")
    sub.add_argument("what", type=_run, metavar="RUN-OR-RECIPE-OR-FILE")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub = command("table", table, "the runs kept as results, a table per task", "mirrorquant table --results results")
    sub.add_argument("--results", type=Path, default=Path("results"), help="folder of the runs' JSON files")
    sub = command("curves", curves, "training curves as PNG", "mirrorquant curves runs/A runs/B --out curves.png")
    sub.add_argument("folders", type=Path, nargs="+", metavar="RUN", help="a run's folder, or its file in results/")
    sub.add_argument("--out", type=Path, default=Path("curves.png"))
    sub = command("plots", draw_projections, "projections, inverses, mirror maps", "mirrorquant plots --out figures")
    sub.add_argument("--out", type=Path, default=Path("figures"))
    sub = command("pack", pack, "a run's network at one bit a weight", "mirrorquant pack runs/NAME -o net.safetensors")
    sub.add_argument("what", type=Path, metavar="RUN", help=f"the run's folder, or its best.pt; {TRUSTED}")
    sub.add_argument("-o", "--out", type=Path, metavar="FILE", help=f"default: RUN/packed{PACKED}")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub = command("export", export, "for other runtimes, at one bit a weight", "mirrorquant export runs/NAME --to onnx")
    sub.add_argument("what", type=Path, metavar="RUN-OR-FILE", help="a run, or a packed file")
    sub.add_argument("--to", required=True, choices=FORMATS)
    sub.add_argument("-o", "--out", type=Path, metavar="FILE", help="default: beside the source")
    sub.add_argument("--shape", type=_shape, help="of one input, as in 3x32x32; default: what the source says")
    sub.add_argument(
        "--model", metavar="MODULE:FUNCTION", help="for a packed file: what builds the model, if it is yours"
    )
    command("kernels", show_kernels, "which kernels run packed networks here", "mirrorquant kernels")
    return parser, list(commands.choices)


def _run(text: str) -> Path:
    """A path; the file of the best network of a run stands for the run."""
    path = Path(text)
    return path.parent if path.name in BEST else path


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number, 1 or more")
    return int(text)


def _shape(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text} is not sizes from 1 on with x between them, as in 3x32x32")
    return [int(size) for size in text.split("x")]


def _common(sub: argparse.ArgumentParser) -> None:
    keys = {name: key for name, key in KEYS.items() if key.section != "origin"}
    rows = (f"  {name:18}{key.help}{_by_default(key)}" for name, key in keys.items())
    sub.epilog = "Any key can be changed by key=value, as in lr=0.01:\n" + "\n".join(rows)
    sub.add_argument("--results", type=Path, metavar="DIR", help="also keep the summary as JSON in this folder")
    sub.add_argument("--quiet", action="store_true", help="no progress")
    sub.add_argument("--json", action="store_true", help="print the summary as JSON")


def _by_default(key: Key) -> str:
    choices = f": {', '.join(key.choices)}" if key.choices else ""
    empty = key.default in ("", None) or key.default == []
    return (
        choices if empty else f"{choices} (default {str(key.default).lower() if key.type == 'bool' else key.default})"
    )
