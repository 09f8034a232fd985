"""How large packed networks are: whole files, on disk, beside the same networks in float32.

    python benchmarks/packed_sizes.py [--json FILE]

All parameters of the networks of the paper are on -1 and +1 (or on -1, 0 and +1), drawn at random; batch norm keeps its
statistics in float32, as trained networks do. The float32 checkpoint is what ``torch.save`` makes of the state.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

import mirrorquant as mq

SHAPES = {"resnet18": (3, 32, 32), "vgg16": (3, 32, 32), "mobilenetv2": (3, 32, 32), "digitsnet": (1, 8, 8)}


def network(name: str, levels: mq.Levels) -> torch.nn.Module:
    torch.manual_seed(0)
    model = mq.models.build(name, 10).eval()
    for parameter in model.parameters():
        parameter.data.copy_(levels.nearest(torch.randn_like(parameter)))
    for norm in model.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):  # the exporter would store equal tensors once
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
    return model


def sizes(name: str, levels: mq.Levels, folder: Path) -> dict[str, int]:
    model = network(name, levels)
    torch.save(model.state_dict(), folder / "float.pt")
    mq.save(model, folder / "packed.safetensors")
    mq.export(model, folder / "float.onnx", SHAPES[name], bits=False)
    mq.export(model, folder / "packed.onnx", SHAPES[name])
    mq.export(model, folder / "packed.xml", SHAPES[name], to="openvino")
    found = {file.name: file.stat().st_size for file in folder.iterdir()}
    found["packed.xml"] += found.pop("packed.bin")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    rows = []
    print(
        f"{'network':14}{'levels':>9}{'checkpoint':>13}{'packed':>12}{'times':>7}{'ONNX':>12}{'times':>7}{'OpenVINO':>12}"
    )
    for levels, label in ((mq.BINARY, "binary"), (mq.TERNARY, "ternary")):
        for name in SHAPES:
            with tempfile.TemporaryDirectory() as folder:
                found = sizes(name, levels, Path(folder))
            full, packed = found["float.pt"], found["packed.safetensors"]
            times = found["float.onnx"] / found["packed.onnx"]
            print(
                f"{name:14}{label:>9}{full:13,}{packed:12,}{full / packed:7.1f}"
                f"{found['packed.onnx']:12,}{times:7.1f}{found['packed.xml']:12,}"
            )
            rows.append({"network": name, "levels": label, "bytes": found, "times": full / packed, "onnx_times": times})
    if options.json:
        options.json.write_text(json.dumps({"mirrorquant": mq.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
