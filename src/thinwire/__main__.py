"""`python -m thinwire` is the command `thinwire`."""

import sys

from thinwire.cli import main

sys.exit(main())
