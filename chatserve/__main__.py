"""``python -m chatserve``: the same as the ``chatserve`` script."""

from chatserve.cli.main import main

main()
