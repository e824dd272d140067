"""``python -m batchgen_lite``."""

from batchgen_lite.cli import main

main()
