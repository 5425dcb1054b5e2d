"""Trained models for other programs: ONNX files and MONAI bundles, each executed before it is called done."""
