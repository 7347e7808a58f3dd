"""`python -m parse_infer`: the command line of `parse_infer.cli.app`."""

import sys

from parse_infer.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
