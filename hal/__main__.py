"""``python -m hal``."""

from hal.cli import main

main()
