"""``python -m tests.fuzz``: see :mod:`tests.fuzz.campaign`. (A worker process cannot import names from this module.)"""

import sys

from tests.fuzz.campaign import main

if __name__ == "__main__":
    sys.exit(main())
