"""The workbench: draw strokes, train, review and correct in the browser. Calls the same functions as the CLI."""
