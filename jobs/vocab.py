"""Submit the vocab stage alone: the tokens that the draft can name.

    python jobs/vocab.py jobs/kimi-k2.5.toml --site mycluster [--dry-run] [--run DIR]

The same as `kimi-eagle submit RECIPE --site SITE --only vocab`, with the same options; it waits
behind the live jobs of the stages before it.
"""

import sys

from kimi_eagle.cli import main

if __name__ == "__main__":
    main(["submit", "--only", "vocab", *sys.argv[1:]])
