"""`pclmix-predict`: label maps from images, with an exported model."""

from __future__ import annotations

import argparse
import sys

from pclmix_runtime import __version__, load


def main() -> None:
    """Run the command; a user's mistake is one message on stderr and exit code 2."""
    from pclmix_runtime.errors import PclmixError
    from pclmix_runtime.inference.files import predict_files

    parser = argparse.ArgumentParser(
        prog="pclmix-predict",
        description="Predict label maps at the images' own size with a model of `pclmix export`.",
        epilog="Example: pclmix-predict heart.onnx images predictions",
    )
    parser.add_argument("model", metavar="MODEL", help="a file of `pclmix export`")
    parser.add_argument("source", metavar="INPUT", help="an image, a folder of images or a dataset")
    parser.add_argument("out", metavar="OUT", help="the folder that gets CASE.nii.gz, or a file where INPUT is one")
    parser.add_argument("--fold", type=int, help="only the test cases of this fold of the dataset INPUT")
    parser.add_argument("--tta", choices=("none", "flip"), default="none", help="average over flipped copies")
    parser.add_argument("--largest-component", action="store_true", help="keep the largest 3D part of each class")
    parser.add_argument("--uncertainty", action="store_true", help="entropy maps, quality.csv and slices.csv too")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--batch", type=int, help="slices through the network at once")
    parser.add_argument("--version", action="version", version=f"pclmix-runtime {__version__}")
    args = parser.parse_args()
    try:
        outcome = predict_files(
            load(args.model, device=args.device, batch=args.batch),
            args.source,
            args.out,
            fold=args.fold,
            tta=args.tta,
            largest_component=args.largest_component,
            uncertainty=args.uncertainty,
            progress=_show if sys.stderr.isatty() else None,
        )
        skipped = f", {len(outcome.skipped)} were there already" if outcome.skipped else ""
        print(f"{len(outcome.done)} predicted{skipped}: {args.out}")
        outcome.require_good()
    except PclmixError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _show(done: int, total: int) -> None:
    print(f"\r{done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)
