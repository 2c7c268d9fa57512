"""``python -m conformance`` is ``shardlaw``."""

import sys

from conformance.cli import main

if __name__ == "__main__":
    sys.exit(main())
