"""Entry point of `python -m synthetic`."""

import sys

from synthetic.cli import main

sys.exit(main())
