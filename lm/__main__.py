"""`python -m lm`."""

import sys

from lm.cli import main

sys.exit(main())
