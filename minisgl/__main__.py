"""`python -m minisgl` is the command `minisgl`."""

from __future__ import annotations

import sys

from minisgl.cli import main

if __name__ == "__main__":
    sys.exit(main())
