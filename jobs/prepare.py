"""Submit the prepare stage alone: conversations become tokens, loss masks and units.

    python jobs/prepare.py jobs/kimi-k2.5.toml --site mycluster [--dry-run] [--run DIR]

The same as `kimi-eagle submit RECIPE --site SITE --only prepare`, with the same options; it waits
behind the live jobs of the stages before it.
"""

import sys

from kimi_eagle.cli import main

if __name__ == "__main__":
    main(["submit", "--only", "prepare", *sys.argv[1:]])
