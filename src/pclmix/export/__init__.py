"""Trained models for other programs: ONNX files and MONAI bundles, each run and compared before it is kept."""
