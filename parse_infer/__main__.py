"""`python -m parse_infer`: the command line of `parse_infer.cli`."""

import sys

from parse_infer.cli import main

if __name__ == "__main__":
    sys.exit(main())
