"""`python -m fprnn`."""

import sys

from synthetic.fprnn_command import main

sys.exit(main())
