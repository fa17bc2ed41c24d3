"""Submit the regenerate stage alone: the verifier answers every prompt.

    python jobs/regenerate.py jobs/kimi-k2.5.toml --site mycluster [--dry-run] [--run DIR]

The same as `kimi-eagle submit RECIPE --site SITE --only regenerate`, with the same options; it
waits behind the live jobs of the stages before it.
"""

import sys

from kimi_eagle.cli import main

if __name__ == "__main__":
    main(["submit", "--only", "regenerate", *sys.argv[1:]])
