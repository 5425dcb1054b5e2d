"""`python -m pclmix` is the `pclmix` command."""

from pclmix.cli import main

main()
