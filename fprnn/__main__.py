"""`python -m fprnn`."""

import sys

from fprnn.command import main

sys.exit(main())
