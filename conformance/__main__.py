"""``python -m shardlaw`` is ``shardlaw``."""

import sys

from shardlaw.conformance.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
