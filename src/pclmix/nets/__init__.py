"""Networks: one architecture per file; segmenter.py is what predicts, dual.py what PCLMix trains."""
