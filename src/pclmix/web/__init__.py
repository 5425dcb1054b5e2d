"""The workbench: a page to draw strokes, train, look and correct. It calls the same functions as the command line."""
