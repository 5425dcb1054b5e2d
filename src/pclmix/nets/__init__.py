"""Networks: segmenter.py is what predicts, dual.py what PCLMix trains beside it."""
