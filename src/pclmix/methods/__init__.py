"""One file per row of the table: each states only what is new about it."""
