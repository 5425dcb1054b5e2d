"""Export to ONNX files and MONAI bundles. Each export is run and compared with the original before it is kept."""
